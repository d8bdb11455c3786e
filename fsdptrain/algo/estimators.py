"""Advantage estimators beside GRPO's: RLOO, none, and functions of the user."""

import math
from collections.abc import Callable, Sequence

from fsdptrain.algo.advantages import Estimate, centered
from fsdptrain.errors import ConfigError, describe


def rloo(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """s - mean of the other samples = G / (G - 1) (s - mean); 0 for a single sample (RLOO, arXiv 2402.14740)."""
    others = max(1, len(rewards) - 1)
    return [len(rewards) / others * x for x in centered(rewards, lengths)]


def none(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """Return 0 for each sample: the rewards are only reported."""
    return [0.0] * len(rewards)


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
