"""Advantages beside GRPO's: the estimators RLOO, none and functions of the user, and scales of the whole batch.

A scale is computed over all scored samples of a rollout, on all ranks: `reduce_sums` sums over ranks, and every rank
must call it, even without samples. Unscored samples keep advantage 0.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from fsdptrain.algo.advantages import STD_EPSILON, Estimate, ReduceSums, centered
from fsdptrain.errors import ConfigError, describe
from fsdptrain.types import Sample

VARIANCE_EPSILON = 1e-8
ROUNDING = 1e-12  # relative rounding error of a mean of equal values; a smaller std counts as 0


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


def divide_by_batch_std(samples: Sequence[Sample], reduce_sums: ReduceSums) -> list[Sample]:
    """A / (std + 1e-6), with the unbiased std of all rewards of the batch (Lite PPO, arXiv 2508.08221; TRL's "batch").

    A small std of one group does not inflate prompts that are almost always or almost never solved. 0 if the batch has
    no spread.
    """
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    _, std = _mean_and_std(rewards, [1] * len(rewards), reduce_sums)
    return _with_advantages(samples, lambda advantage: advantage / (std + STD_EPSILON) if std else 0.0)


def whiten_tokens(samples: Sequence[Sample], reduce_sums: ReduceSums) -> list[Sample]:
    """(A - mean) / sqrt(var + 1e-8), unbiased, over the response tokens of the batch (REINFORCE++, arXiv 2501.03262).

    Gives mean 0 and variance 1, weighting each sample by its number of tokens. For groups too small for their own std.
    """
    scored = [sample for sample in samples if sample.reward is not None]
    lengths = [sample.num_generated for sample in scored]
    mean, std = _mean_and_std([sample.advantage for sample in scored], lengths, reduce_sums)
    scale = math.sqrt(std * std + VARIANCE_EPSILON)
    return _with_advantages(samples, lambda advantage: (advantage - mean) / scale)


def _mean_and_std(values: Sequence[float], counts: Sequence[int], reduce_sums: ReduceSums) -> tuple[float, float]:
    """Return mean and std over all ranks of values weighted by `counts`.

    Uses two passes, so a large mean costs no precision.
    """
    pairs = list(zip(values, counts, strict=True))
    sums = reduce_sums({"counts": sum(counts), "values": math.fsum(count * value for value, count in pairs)})
    mean = sums["values"] / max(1, sums["counts"])
    squares = reduce_sums({"squares": math.fsum(count * (value - mean) ** 2 for value, count in pairs)})["squares"]
    std = math.sqrt(squares / max(1, sums["counts"] - 1))
    return mean, std if std > ROUNDING * abs(mean) else 0.0


def _with_advantages(samples: Sequence[Sample], change: Callable[[float], float]) -> list[Sample]:
    return [s if s.reward is None else replace(s, advantage=change(s.advantage)) for s in samples]
