"""From the rewards of a group (the samples of one prompt) to advantages.

An estimator compares the rewards of a group; then its values are divided by a scale, that of the group or one of the
batch of all ranks. `assign_advantages` is all that a rank can do by itself, `scale_over_batch` is the rest.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fsdptrain.algo.batch_scales import STD_EPSILON, ReduceSums, divide_by_batch_std, whiten_samples, whiten_tokens
from fsdptrain.errors import ConfigError, describe
from fsdptrain.types import Sample

Estimate = Callable[[Sequence[float], Sequence[int]], Sequence[float]]  # rewards, lengths of a group -> advantages


@dataclass(frozen=True)
class AdvantageRule:
    """How a run makes advantages of rewards."""

    estimate: Estimate
    scale: str = "none"  # group, batch, whiten, none
    weights: Mapping[str, float] | None = None  # of the parts of the reward that are normalised one by one: GDPO


def assign_advantages(samples: Sequence[Sample], rule: AdvantageRule) -> list[Sample]:
    """The same samples, in order, with their advantages; whole groups must be here.

    A sample that could not be scored (reward None) gets 0, and takes no part in the statistics of its group. The batch
    of all ranks may have a word too: `scale_over_batch` comes after this.
    """
    assigned = list(samples)
    for indices in scored_groups(samples):
        members = [samples[index] for index in indices]
        for index, advantage in zip(indices, _of_group(members, rule), strict=True):
            assigned[index] = replace(samples[index], advantage=advantage)
    return assigned


def scale_over_batch(samples: Sequence[Sample], rule: AdvantageRule, reduce_sums: ReduceSums) -> list[Sample]:
    """What the batch does to advantages that `assign_advantages` made; collective by `reduce_sums`."""
    if rule.weights is not None:
        return whiten_samples(samples, reduce_sums)
    if rule.scale == "whiten":
        return whiten_tokens(samples, reduce_sums)
    if rule.scale == "batch":
        return divide_by_batch_std(samples, reduce_sums)
    return list(samples)


def sum_then_normalize(members: Sequence[Sample], rule: AdvantageRule) -> list[float]:
    """sum_k w_k s_k, a single reward, of which advantages are made as of any other."""
    return _estimated([_reward(member) for member in members], members, rule)


def normalize_then_sum(members: Sequence[Sample], rule: AdvantageRule) -> list[float]:
    """sum_k w_k A_k, with A_k = (s_k - mean) / (std + 1e-6) of reward k within the group (GDPO, arXiv 2601.05242).

    Then, over the samples of the batch, (A - mean) / (std + 1e-6). Rewards of different scale or difficulty keep their
    say. A penalty of shaping is a reward too, and its coefficient is the weight.
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
    """How many groups have no spread and so teach nothing, and how many groups there are.

    Of the reward; or of every one of `parts`, where these are normalised one by one.
    """
    names, flat = list(parts), 0
    for indices in scored_groups(samples):
        members = [samples[index] for index in indices]
        columns = [[m.rewards[name] for m in members] for name in names] or [[_reward(m) for m in members]]
        flat += all(_flat(column) for column in columns)
    unscored = {sample.group_id for sample in samples} - {s.group_id for s in samples if s.reward is not None}
    return flat + len(unscored), len({sample.group_id for sample in samples})


def scored_groups(samples: Sequence[Sample]) -> list[list[int]]:
    """Indices of the scored samples of each group that has one, in order of appearance."""
    groups: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        if sample.reward is not None:
            groups.setdefault(sample.group_id, []).append(index)
    return list(groups.values())


def divide_by_group_std(advantages: Sequence[float], rewards: Sequence[float]) -> list[float]:
    """A / (std + 1e-6), the unbiased std of the rewards of the group; 0 where there is no spread (arXiv 2402.03300).

    Every prompt has the same say, however rarely it is solved.
    """
    if _flat(rewards):
        return [0.0] * len(rewards)
    std = math.sqrt(math.fsum(x * x for x in _centred(rewards, ())) / (len(rewards) - 1))
    return [advantage / (std + STD_EPSILON) for advantage in advantages]


def own_estimate(function: Callable[..., Sequence[float]], name: str) -> Estimate:
    """`function` of a user, whose mistakes are ConfigErrors of one line that names it."""

    def estimate(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
        given = f"for rewards {list(rewards)} of lengths {list(lengths)}"
        try:
            advantages = [float(value) for value in function(list(rewards), list(lengths))]
        except Exception as error:  # a user's function
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
        return [0.0] * len(rewards)  # exactly, whatever the rounding of the mean
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def _grpo(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """s - mean, which its scale divides by the std of the group (GRPO, arXiv 2402.03300)."""
    return _centred(rewards, lengths)


def _dr_grpo(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """s - mean: no std, which would favour prompts that are nearly always or nearly never solved (arXiv 2503.20783)."""
    return _centred(rewards, lengths)


def _to_be_whitened(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """s - mean, whitened over the batch by its scale (REINFORCE++ with baseline, arXiv 2501.03262)."""
    return _centred(rewards, lengths)


def _rloo(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """s - the mean of the others = G / (G - 1) (s - mean); 0 for a sample that is alone (RLOO, arXiv 2402.14740)."""
    others = max(1, len(rewards) - 1)
    return [len(rewards) / others * x for x in _centred(rewards, lengths)]


def _max_rl(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """(s - mean) / mean, for rewards of 0 or more: rare successes count most (MaxRL, arXiv 2602.02710).

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
