"""Advantages from the rewards of a group (the samples of one prompt).

An estimator compares the rewards within a group. Its values are then divided by a scale of the group or of the batch of
all ranks. `assign_advantages` is the rank-local part, `scale_over_batch` the collective part.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from fsdptrain.registry import Table
from fsdptrain.types import Sample

STD_EPSILON = 1e-6

ReduceSums = Callable[[Mapping[str, float]], Mapping[str, float]]
Estimate = Callable[[Sequence[float], Sequence[int]], Sequence[float]]  # (rewards, lengths) of a group -> advantages


@dataclass(frozen=True)
class AdvantageRule:
    """Computation of advantages from rewards."""

    estimate: Estimate
    scale: str = "none"  # group, batch, whiten, none


def assign_advantages(samples: Sequence[Sample], rule: AdvantageRule) -> list[Sample]:
    """Set the advantages of `samples`, which must contain whole groups. Keeps the order.

    Unscored samples (reward None) get advantage 0 and are excluded from the statistics of their group. Call
    `scale_over_batch` afterwards.
    """
    assigned = list(samples)
    for indices in groups_with_rewards(samples):
        rewards = [_reward(samples[index]) for index in indices]
        lengths = [samples[index].num_generated for index in indices]
        advantages = rule.estimate(rewards, lengths)
        if rule.scale == "group":
            advantages = divide_by_group_std(advantages, rewards)
        for index, advantage in zip(indices, advantages, strict=True):
            assigned[index] = replace(samples[index], advantage=advantage)
    return assigned


def scale_over_batch(samples: Sequence[Sample], rule: AdvantageRule, reduce_sums: ReduceSums) -> list[Sample]:
    """Apply the batch scale of `rule` to the advantages from `assign_advantages`. Collective through `reduce_sums`."""
    if rule.scale not in BATCH_SCALES:
        return list(samples)
    return BATCH_SCALES[rule.scale](samples, reduce_sums)


def zero_spread_groups(samples: Sequence[Sample]) -> tuple[int, int]:
    """Return the number of groups without reward spread, which give no learning signal, and the number of groups."""
    groups = groups_with_rewards(samples)
    num_equal = sum(all_equal([_reward(samples[index]) for index in indices]) for indices in groups)
    unscored = {sample.group_id for sample in samples} - {s.group_id for s in samples if s.reward is not None}
    return num_equal + len(unscored), len({sample.group_id for sample in samples})


def groups_with_rewards(samples: Sequence[Sample]) -> list[list[int]]:
    """Return the indices of scored samples by group, in order of appearance. Omits groups without scored samples."""
    groups: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        if sample.reward is not None:
            groups.setdefault(sample.group_id, []).append(index)
    return list(groups.values())


def divide_by_group_std(advantages: Sequence[float], rewards: Sequence[float]) -> list[float]:
    """A / (std + 1e-6), with the unbiased std of the group's rewards; 0 without spread (arXiv 2402.03300).

    Every prompt has the same weight, however rarely it is solved.
    """
    if all_equal(rewards):
        return [0.0] * len(rewards)
    std = math.sqrt(math.fsum(x * x for x in centered(rewards, ())) / (len(rewards) - 1))
    return [advantage / (std + STD_EPSILON) for advantage in advantages]


def centered(rewards: Sequence[float], _lengths: Sequence[int]) -> list[float]:
    """Return s - mean."""
    if all_equal(rewards):
        return [0.0] * len(rewards)  # exact zeros, regardless of rounding in the mean
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def grpo(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """s - mean, then divided by the std of the group (GRPO, arXiv 2402.03300)."""
    return centered(rewards, lengths)


def dr_grpo(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """s - mean; the std would favor prompts that are almost always or almost never solved (arXiv 2503.20783)."""
    return centered(rewards, lengths)


def to_be_whitened(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """s - mean, then whitened over the batch (REINFORCE++ with baseline, arXiv 2501.03262)."""
    return centered(rewards, lengths)


def all_equal(rewards: Sequence[float]) -> bool:
    return min(rewards) == max(rewards)


def _reward(sample: Sample) -> float:
    assert sample.reward is not None
    return sample.reward


_HERE, _ESTIMATORS = "fsdptrain.algo.advantages", "fsdptrain.algo.estimators"
ADVANTAGES = Table[Estimate](
    {
        "grpo": f"{_HERE}:grpo",
        "dr_grpo": f"{_HERE}:dr_grpo",
        "rloo": f"{_ESTIMATORS}:rloo",
        "reinforce++_baseline": f"{_HERE}:to_be_whitened",
        "none": f"{_ESTIMATORS}:none",
    }
)
BATCH_SCALES = Table[Callable[[Sequence[Sample], ReduceSums], list[Sample]]](
    {"batch": f"{_ESTIMATORS}:divide_by_batch_std", "whiten": f"{_ESTIMATORS}:whiten_tokens"}
)
