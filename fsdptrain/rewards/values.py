"""Values of rewards. No torch: reward workers import this module."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

WRONG = ", which is not a "  # in reasons that show a bug of the reward, not of the response
MOST_REWARD = 1e6  # above it, the squares of a group's rewards would round away the differences
_TOLERANCE = 1e-6  # weighted sums of rewards reach 1.0 only up to rounding


@dataclass(frozen=True)
class RewardResult:
    """Score of one response: the reward, None if it cannot be scored, and its parts by name."""

    reward: float | None
    rewards: Mapping[str, float] = field(default_factory=dict)


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
        raise TypeError(f"the reward returned a mapping with the key {key!r:.80}{WRONG}string")
    return key


def _number(value: Any) -> float:
    try:
        value = value.item() if getattr(value, "size", None) == 1 else value  # numpy; float() takes tensors
        number = None if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, RuntimeError):  # of several numbers
        number = None
    if number is None:
        raise TypeError(f"the reward returned {value!r:.80}{WRONG}number")
    if not math.isfinite(number):
        raise ValueError(f"the reward returned {number}")
    return number


def is_correct(reward: float | None, threshold: float = 1.0) -> bool:
    """Return whether `reward` reaches `threshold` (--pass-threshold), up to rounding."""
    return reward is not None and reward >= threshold - _TOLERANCE
