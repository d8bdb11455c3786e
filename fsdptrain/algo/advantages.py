"""Advantages from the rewards of a group (the samples of one prompt).

An estimator compares the rewards within a group. Its values are then divided by a scale of the group or of the batch of
all ranks. `assign_advantages` is the rank-local part, `scale_over_batch` the collective part.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fsdptrain.errors import ConfigError, describe
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
    weights: Mapping[str, float] | None = None  # weights of reward parts that are normalized separately (GDPO)


def assign_advantages(samples: Sequence[Sample], rule: AdvantageRule) -> list[Sample]:
    """Set the advantages of `samples`, which must contain whole groups. Keeps the order.

    Unscored samples (reward None) get advantage 0 and are excluded from the statistics of their group. Call
    `scale_over_batch` afterwards.
    """
    assigned = list(samples)
    for indices in scored_groups(samples):
        members = [samples[index] for index in indices]
        for index, advantage in zip(indices, _of_group(members, rule), strict=True):
            assigned[index] = replace(samples[index], advantage=advantage)
    return assigned


def scale_over_batch(samples: Sequence[Sample], rule: AdvantageRule, reduce_sums: ReduceSums) -> list[Sample]:
    """Apply the batch scale of `rule` to the advantages from `assign_advantages`. Collective through `reduce_sums`."""
    if rule.weights is None and rule.scale not in BATCH_SCALES:
        return list(samples)
    scale = BATCH_SCALES["whiten_samples" if rule.weights is not None else rule.scale]
    return scale(samples, reduce_sums)


def sum_then_normalize(members: Sequence[Sample], rule: AdvantageRule) -> list[float]:
    """sum_k w_k s_k: one combined reward, from which the estimator computes advantages."""
    return _estimated([_reward(member) for member in members], members, rule)


def normalize_then_sum(members: Sequence[Sample], rule: AdvantageRule) -> list[float]:
    """sum_k w_k A_k, with A_k = (s_k - mean) / (std + 1e-6) of reward k within the group (GDPO, arXiv 2601.05242).

    The sum A is then normalized over the samples of the batch: (A - mean) / (std + 1e-6). Each reward keeps its
    influence, regardless of its scale or difficulty. A shaping penalty is a reward too, weighted by its coefficient.
    """
    assert rule.weights is not None
    total = [0.0] * len(members)
    for name, weight in rule.weights.items():
        missing = [member.rewards for member in members if name not in member.rewards]
        if missing:
            raise ConfigError(
                f"--multi-reward normalize_then_sum needs the reward {name!r} of every sample, got {dict(missing[0])}: "
                "leave it out"
            )
        estimated = _estimated([member.rewards[name] for member in members], members, rule)
        total = [sum_ + weight * value for sum_, value in zip(total, estimated, strict=True)]
    return total


def zero_spread_groups(samples: Sequence[Sample], parts: Iterable[str] = ()) -> tuple[int, int]:
    """Return the number of groups without reward spread, which give no learning signal, and the number of groups.

    If `parts` are given (separately normalized rewards), a group counts if none of them has spread.
    """
    names, flat = list(parts), 0
    for indices in scored_groups(samples):
        members = [samples[index] for index in indices]
        columns = [[m.rewards[name] for m in members] for name in names] or [[_reward(m) for m in members]]
        flat += all(_flat(column) for column in columns)
    unscored = {sample.group_id for sample in samples} - {s.group_id for s in samples if s.reward is not None}
    return flat + len(unscored), len({sample.group_id for sample in samples})


def scored_groups(samples: Sequence[Sample]) -> list[list[int]]:
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
    if _flat(rewards):
        return [0.0] * len(rewards)
    std = math.sqrt(math.fsum(x * x for x in _centred(rewards, ())) / (len(rewards) - 1))
    return [advantage / (std + STD_EPSILON) for advantage in advantages]


def own_estimate(function: Callable[..., Sequence[float]], name: str) -> Estimate:
    """Wrap the user's `function` so that its errors become one-line ConfigErrors with its name."""

    def estimate(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
        given = f"for rewards {list(rewards)} of lengths {list(lengths)}"
        try:
            advantages = [float(value) for value in function(list(rewards), list(lengths))]
        except Exception as error:  # user code may raise anything
            raise ConfigError(f"--advantage-estimator {name} failed {given}: {describe(error)}") from error
        if len(advantages) != len(rewards) or not all(math.isfinite(value) for value in advantages):
            raise ConfigError(
                f"--advantage-estimator {name} returned {advantages} {given}: it must be one finite number for each"
            )
        return advantages

    return estimate


def _of_group(members: Sequence[Sample], rule: AdvantageRule) -> list[float]:
    return (sum_then_normalize if rule.weights is None else normalize_then_sum)(members, rule)


def _estimated(rewards: Sequence[float], members: Sequence[Sample], rule: AdvantageRule) -> list[float]:
    advantages = rule.estimate(rewards, [sum(member.loss_mask) for member in members])
    return divide_by_group_std(advantages, rewards) if rule.scale == "group" else list(advantages)


def _centred(rewards: Sequence[float], _lengths: Sequence[int]) -> list[float]:
    if _flat(rewards):
        return [0.0] * len(rewards)  # exact zeros, regardless of rounding in the mean
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def _grpo(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """s - mean, then divided by the std of the group (GRPO, arXiv 2402.03300)."""
    return _centred(rewards, lengths)


def _dr_grpo(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """s - mean; the std would favor prompts that are almost always or almost never solved (arXiv 2503.20783)."""
    return _centred(rewards, lengths)


def _to_be_whitened(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """s - mean, then whitened over the batch (REINFORCE++ with baseline, arXiv 2501.03262)."""
    return _centred(rewards, lengths)


def _rloo(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """s - mean of the other samples = G / (G - 1) (s - mean); 0 for a single sample (RLOO, arXiv 2402.14740)."""
    others = max(1, len(rewards) - 1)
    return [len(rewards) / others * x for x in _centred(rewards, lengths)]


def _max_rl(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """(s - mean) / mean, for rewards >= 0; gives rare successes the largest advantages (MaxRL, arXiv 2602.02710).

    0 if the mean is not positive, because a negative mean would flip the sign of every advantage.
    """
    mean = math.fsum(rewards) / len(rewards)
    return [x / mean if mean > 0 else 0.0 for x in _centred(rewards, lengths)]


def _opo(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """s - sum(T s) / sum(T), T the response length: the minimum-variance baseline (OPO, arXiv 2505.23585).

    Assumes that the gradient norm of a response grows with its length.
    """
    total = sum(lengths)
    if _flat(rewards) or not total:
        return _centred(rewards, lengths)
    baseline = math.fsum(length * reward for length, reward in zip(lengths, rewards, strict=True)) / total
    return [reward - baseline for reward in rewards]


def _flat(rewards: Sequence[float]) -> bool:
    return min(rewards) == max(rewards)


def _reward(sample: Sample) -> float:
    assert sample.reward is not None
    return sample.reward


ADVANTAGES: Mapping[str, Estimate] = {
    "grpo": _grpo,
    "dr_grpo": _dr_grpo,
    "rloo": _rloo,
    "reinforce++_baseline": _to_be_whitened,
    "max_rl": _max_rl,
    "opo": _opo,
}
MULTI_REWARD: Mapping[str, Callable[..., list[float]]] = {
    "sum_then_normalize": sum_then_normalize,
    "normalize_then_sum": normalize_then_sum,
}
BATCH_SCALES = Table[Callable[[Sequence[Sample], ReduceSums], list[Sample]]](
    {
        "batch": "fsdptrain.algo.batch_scales:divide_by_batch_std",
        "whiten": "fsdptrain.algo.batch_scales:whiten_tokens",
        "whiten_samples": "fsdptrain.algo.batch_scales:whiten_samples",
    }
)
