"""Advantage estimators beside GRPO's: RLOO, MaxRL, OPO, GDPO, and functions of the user."""

import math
from collections.abc import Callable, Sequence

from fsdptrain.algo.advantages import AdvantageRule, Estimate, all_equal, centered, estimated
from fsdptrain.errors import ConfigError, describe
from fsdptrain.types import Sample


def rloo(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """s - mean of the other samples = G / (G - 1) (s - mean); 0 for a single sample (RLOO, arXiv 2402.14740)."""
    others = max(1, len(rewards) - 1)
    return [len(rewards) / others * x for x in centered(rewards, lengths)]


def max_rl(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """(s - mean) / mean, for rewards >= 0; gives rare successes the largest advantages (MaxRL, arXiv 2602.02710).

    0 if the mean is not positive, because a negative mean would flip the sign of every advantage.
    """
    mean = math.fsum(rewards) / len(rewards)
    return [x / mean if mean > 0 else 0.0 for x in centered(rewards, lengths)]


def opo(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """s - sum(T s) / sum(T), T the response length: the minimum-variance baseline (OPO, arXiv 2505.23585).

    Assumes that the gradient norm of a response grows with its length.
    """
    total = sum(lengths)
    if all_equal(rewards) or not total:
        return centered(rewards, lengths)
    baseline = math.fsum(length * reward for length, reward in zip(lengths, rewards, strict=True)) / total
    return [reward - baseline for reward in rewards]


def none(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """Return 0 for each sample: the rewards are only reported."""
    return [0.0] * len(rewards)


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
                "remove it"
            )
        values = estimated([member.rewards[name] for member in members], members, rule)
        total = [sum_ + weight * value for sum_, value in zip(total, values, strict=True)]
    return total


def user_estimator(function: Callable[..., Sequence[float]], name: str) -> Estimate:
    """Wrap the user's `function` so that its errors become one-line ConfigErrors with its name."""

    def estimate(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
        given = f"for rewards {list(rewards)} of lengths {list(lengths)}"
        try:
            advantages = [float(value) for value in function(list(rewards), list(lengths))]
        except (Exception, SystemExit) as error:  # user code may raise anything
            raise ConfigError(f"--advantage-estimator {name} failed {given}: {describe(error)}") from error
        if len(advantages) != len(rewards) or not all(math.isfinite(value) for value in advantages):
            raise ConfigError(
                f"--advantage-estimator {name} returned {advantages} {given}: expected one finite number per reward"
            )
        return advantages

    return estimate
