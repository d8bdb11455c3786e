"""From the rewards of a group (the samples of one prompt) to advantages."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from fsdptrain.types import Sample

STD_EPSILON = 1e-6
VARIANCE_EPSILON = 1e-8

ReduceSums = Callable[[Mapping[str, float]], Mapping[str, float]]


@dataclass(frozen=True)
class Advantage:
    """One estimator."""

    estimate: Callable[[Sequence[float], Sequence[int]], list[float]]  # rewards and lengths of a group -> advantages
    whitened: bool = False  # over the whole batch afterwards, see `whiten`


def assign_advantages(samples: Sequence[Sample], estimator: str) -> list[Sample]:
    """The same samples, in order, with their advantages; whole groups must be here.

    A sample that could not be scored (reward None) gets 0, and takes no part in the statistics of its group. For an
    estimator that is `whitened` the batch of all ranks has a word too: `whiten` comes after this.
    """
    estimate = ADVANTAGES[estimator].estimate
    advantages = [0.0] * len(samples)
    for members in _scored_groups(samples):
        rewards = [reward for _, reward in members]
        lengths = [sum(samples[index].loss_mask) for index, _ in members]
        for (index, _), advantage in zip(members, estimate(rewards, lengths), strict=True):
            advantages[index] = advantage
    return [replace(sample, advantage=advantage) for sample, advantage in zip(samples, advantages, strict=True)]


def whiten(samples: Sequence[Sample], reduce_sums: ReduceSums) -> list[Sample]:
    """Whitened: mean 0 and variance 1 over the response tokens of the whole batch (REINFORCE++, arXiv 2501.03262).

    (A - mean) / sqrt(var + 1e-8), unbiased; each of a sample's tokens counts, an unscored sample's do not and it keeps
    its 0. `reduce_sums` adds up over the ranks: every rank must call this, with whatever samples it has.
    """
    scored = [(sample.advantage, sum(sample.loss_mask)) for sample in samples if sample.reward is not None]
    sums = reduce_sums(
        {
            "tokens": sum(length for _, length in scored),
            "advantages": math.fsum(length * advantage for advantage, length in scored),
            "squares": math.fsum(length * advantage * advantage for advantage, length in scored),
        }
    )
    if sums["tokens"] < 2 or sums["squares"] == 0:
        return list(samples)
    mean = sums["advantages"] / sums["tokens"]
    variance = max(0.0, sums["squares"] - sums["tokens"] * mean * mean) / (sums["tokens"] - 1)
    scale = math.sqrt(variance + VARIANCE_EPSILON)
    return [s if s.reward is None else replace(s, advantage=(s.advantage - mean) / scale) for s in samples]


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


def _grpo(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """(s - mean) / (std + 1e-6) with the unbiased std; 0 where there is no spread (GRPO, arXiv 2402.03300)."""
    centred = _centred(rewards, lengths)
    if not any(centred):
        return centred
    std = math.sqrt(math.fsum(x * x for x in centred) / (len(rewards) - 1))
    return [x / (std + STD_EPSILON) for x in centred]


def _centred(rewards: Sequence[float], _lengths: Sequence[int]) -> list[float]:
    """s - mean: no std, which would favour prompts that are nearly always or nearly never solved (arXiv 2503.20783)."""
    if _flat(rewards):
        return [0.0] * len(rewards)  # exactly, whatever the rounding of the mean
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def _to_be_whitened(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """s - mean within the group; the scale comes from the batch (REINFORCE++ with baseline, arXiv 2501.03262)."""
    return _centred(rewards, lengths)


def _rloo(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """s - the mean of the others = G / (G - 1) (s - mean); 0 for a sample that is alone (RLOO, arXiv 2402.14740)."""
    others = max(1, len(rewards) - 1)
    return [len(rewards) / others * x for x in _centred(rewards, lengths)]


def _max_rl(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """(s - mean) / mean, for rewards of 0 or more: rare successes count most (maximum-likelihood RL, 2026).

    0 where the mean is not above 0: below it the division would turn the sign of every advantage.
    """
    mean = math.fsum(rewards) / len(rewards)
    return [x / mean if mean > 0 else 0.0 for x in _centred(rewards, lengths)]


def _opo(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """s - sum(T s) / sum(T), T the response length: the baseline of least variance (OPO, arXiv 2505.23585).

    It is so if the gradient of a response has a norm that grows with its length.
    """
    total = sum(lengths)
    if _flat(rewards) or not total:
        return _centred(rewards, lengths)
    baseline = math.fsum(length * reward for length, reward in zip(lengths, rewards, strict=True)) / total
    return [reward - baseline for reward in rewards]


def _flat(rewards: Sequence[float]) -> bool:
    return min(rewards) == max(rewards)


ADVANTAGES: Mapping[str, Advantage] = {
    "grpo": Advantage(_grpo),
    "dr_grpo": Advantage(_centred),
    "rloo": Advantage(_rloo),
    "reinforce++_baseline": Advantage(_to_be_whitened, whitened=True),
    "max_rl": Advantage(_max_rl),
    "opo": Advantage(_opo),
}
