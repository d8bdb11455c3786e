"""Scoring of responses. A sample that cannot be scored does not end the run; too many do."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdptrain.distributed import gather, sum_over_ranks
from fsdptrain.errors import RewardError, RolloutError, describe
from fsdptrain.protocols import RewardFunction, TimedReward
from fsdptrain.types import Prompt

MOST_REWARD = 1e6  # above it, the squares of a group's rewards would round away the differences


@dataclass(frozen=True)
class RewardResult:
    """Score of one response: the reward, None if it cannot be scored, and its parts by name."""

    reward: float | None
    rewards: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardResults:
    """Scores of responses, in order."""

    results: list[RewardResult]
    num_unscored: int
    first_error: str | None  # error of the first unscored response; None if all were scored

    def __add__(self, other: "RewardResults") -> "RewardResults":
        return RewardResults(
            [*self.results, *other.results],
            self.num_unscored + other.num_unscored,
            self.first_error or other.first_error,
        )


def compute_rewards(reward: RewardFunction, prompts: Sequence[Prompt], texts: Sequence[str]) -> RewardResults:
    """Score `texts[i]` as a response to `prompts[i]`, sequentially. Call it once per rank for a rollout or round.

    If the reward raises, or returns None or a non-finite or non-numeric value, the sample is unscored. RolloutError
    propagates and ends the rollout.
    """
    if isinstance(reward, TimedReward):
        reward.begin_rollout()
    results: list[RewardResult] = []
    first_error: str | None = None
    for prompt, text in zip(prompts, texts, strict=True):
        result, error = _compute_reward(reward, prompt, text)
        results.append(result)
        first_error = first_error or error
    return RewardResults(results, sum(result.reward is None for result in results), first_error)


def check_failed_rewards(results: RewardResults, *, max_unscored_fraction: float) -> int:
    """Return the number of unscored samples on all ranks. Collective. Raises RewardError on all ranks if too many."""
    unscored, total = map(int, sum_over_ranks([results.num_unscored, len(results.results)]))
    if unscored > max_unscored_fraction * total:
        first_error = next((error for error in gather(results.first_error) if error), None)
        raise RewardError(
            f"--reward could not score {unscored} of {total} samples, more than --max-unscored-fraction "
            f"{max_unscored_fraction}; the first reason: {first_error}"
        )
    return unscored


def to_result(value: Any, *, name: str = "") -> RewardResult:
    """Convert the return value of a reward to a score. Values must be finite, the total at most MOST_REWARD.

    A number is the reward, also reported under `name` if given. In a mapping, "reward" is the reward (default: the sum
    of all values), and all other keys are reported. Raises TypeError or ValueError for anything else.
    """
    if value is None:
        return RewardResult(None)
    if isinstance(value, Mapping) and not value:
        raise ValueError("the reward returned an empty mapping")
    parts = {_name(key): _number(part) for key, part in value.items()} if isinstance(value, Mapping) else {}
    total = parts.pop("reward", math.fsum(parts.values())) if isinstance(value, Mapping) else _number(value)
    if abs(total) > MOST_REWARD:
        raise ValueError(f"the reward returned {total:g}, more than {MOST_REWARD:g} in magnitude")
    return RewardResult(total, {**parts, name: total} if name else parts)


def _name(key: Any) -> str:
    if not isinstance(key, str):
        raise TypeError(f"the reward returned a mapping with the key {key!r:.80}, which is not a string")
    return key


def _number(value: Any) -> float:
    if isinstance(value, str | bytes):
        raise TypeError(f"the reward returned {value!r:.80}, which is not a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"the reward returned {number}")
    return number


def _compute_reward(reward: RewardFunction, prompt: Prompt, text: str) -> tuple[RewardResult, str | None]:
    try:
        result = to_result(reward(prompt, text))
    except RolloutError:
        raise
    except RewardError as error:
        return RewardResult(None), str(error)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # user code may raise anything; the run continues
        return RewardResult(None), describe(error)
    return result, "the reward returned None" if result.reward is None else None
