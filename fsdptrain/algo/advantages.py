"""From the rewards of a group (the samples of one prompt) to advantages."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from fsdptrain.types import Sample

STD_EPSILON = 1e-6


def assign_advantages(samples: Sequence[Sample], estimator: str) -> list[Sample]:
    """The same samples, in order, with their advantages; whole groups must be here.

    A sample that could not be scored (reward None) gets 0, and takes no part in the statistics of its group.
    """
    estimate = ADVANTAGES[estimator]
    advantages = [0.0] * len(samples)
    for members in _scored_groups(samples):
        rewards = [reward for _, reward in members]
        for (index, _), advantage in zip(members, estimate(rewards), strict=True):
            advantages[index] = advantage
    return [replace(sample, advantage=advantage) for sample, advantage in zip(samples, advantages, strict=True)]


def zero_spread_groups(samples: Sequence[Sample]) -> tuple[int, int]:
    """How many groups have no spread in their rewards and so teach nothing, and how many groups there are."""
    flat = sum(_flat([reward for _, reward in members]) for members in _scored_groups(samples))
    unscored = {sample.group_id for sample in samples} - {s.group_id for s in samples if s.reward is not None}
    return flat + len(unscored), len({sample.group_id for sample in samples})


def _scored_groups(samples: Sequence[Sample]) -> list[list[tuple[int, float]]]:
    groups: dict[str, list[tuple[int, float]]] = {}
    for index, sample in enumerate(samples):
        if sample.reward is not None:
            groups.setdefault(sample.group_id, []).append((index, sample.reward))
    return list(groups.values())


def _grpo(rewards: Sequence[float]) -> list[float]:
    """(s - mean) / (std + 1e-6) with the unbiased std; 0 where there is no spread (GRPO, arXiv 2402.03300)."""
    if _flat(rewards):
        return [0.0] * len(rewards)
    centred = _dr_grpo(rewards)
    std = math.sqrt(math.fsum(x * x for x in centred) / (len(rewards) - 1))
    return [x / (std + STD_EPSILON) for x in centred]


def _dr_grpo(rewards: Sequence[float]) -> list[float]:
    """s - mean: no std, which would favour prompts that are nearly always or nearly never solved (arXiv 2503.20783)."""
    if _flat(rewards):
        return [0.0] * len(rewards)  # exactly, whatever the rounding of the mean
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def _flat(rewards: Sequence[float]) -> bool:
    return min(rewards) == max(rewards)


ADVANTAGES: Mapping[str, Callable[[Sequence[float]], list[float]]] = {"grpo": _grpo, "dr_grpo": _dr_grpo}
