"""Construction of the reward function from `--reward`.

A reward is a function (prompt, response text) -> reward, usually 0 or 1, or None if it cannot be scored; calls.py lists
the other forms. To add one, register it in `REWARDS`, or pass `--reward package.module:function`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fsdptrain import registry
from fsdptrain.config import RewardConfig
from fsdptrain.errors import ConfigError
from fsdptrain.rewards.calls import RewardCalls, check_signature
from fsdptrain.rewards.values import RewardResult
from fsdptrain.types import Prompt

if TYPE_CHECKING:
    from fsdptrain.protocols import RewardFunction

REWARDS: "registry.Table[RewardFunction]" = registry.Table(
    {
        "environment": "fsdptrain.rewards.functions:environment",
        "reasoning_gym": "fsdptrain.rewards.gym:reasoning_gym",
        "reasoning_gym_strict": "fsdptrain.rewards.gym:reasoning_gym_strict",
        "math": "fsdptrain.rewards.functions:math",
        "exact": "fsdptrain.rewards.functions:exact",
        "format": "fsdptrain.rewards.functions:format_tags",
        "code": "fsdptrain.rewards.code:code",
        "none": "fsdptrain.rewards.functions:none",
    }
)
GENERATOR = "reasoning_gym:"
RESERVED = {"reward", "mean", "std", "unscored_fraction", "kl", "overlong", "length"}  # reserved: reward/<name> exists


def build_reward(
    reward: RewardConfig, *, prompt_data: str, has_environment: bool = False, key: str | None = None
) -> "WeightedSum":
    """Build the weighted sum of `--reward`, e.g. ["math=0.9", "format=0.1"]. Components are reported by name.

    `auto` selects the reasoning-gym scorer for its data, else the environment's reward, else `math`. Raises ConfigError
    for an unknown name, an invalid weight, or a scorer that does not support the data.
    """
    weights = _parse_all(reward, prompt_data, has_environment)
    short = [_short(name) for name in weights]
    metrics = [s if short.count(s) == 1 else name.replace(":", ".") for s, name in zip(short, weights, strict=True)]
    parts = zip(metrics, weights.items(), strict=True)
    return WeightedSum(tuple(Component(metric, weight, _function(name)) for metric, (name, weight) in parts), key)


def check_reward(reward: RewardConfig, *, prompt_data: str, has_environment: bool = False) -> None:
    """Raise the ConfigError that `build_reward` would raise. Imports functions of the user, but no others."""
    for name in _parse_all(reward, prompt_data, has_environment):
        if name not in REWARDS:
            calls = RewardCalls(_function(name), where=f"--reward {name}")
            if "completions" not in calls.parameters:  # which also takes columns of the data
                check_signature(calls, Prompt("0", [], ""))


@dataclass(frozen=True)
class Component:
    name: str  # key in Sample.rewards
    weight: float
    function: "RewardFunction"
    eval_set: str = ""  # scores only this one


@dataclass(frozen=True)
class WeightedSum:
    """Weighted sum of rewards."""

    components: tuple[Component, ...]
    key: str | None = None  # --reward-key

    @property
    def reads_environment(self) -> bool:
        """Whether the environment's reward can affect this one. True for custom functions, which are unknown."""
        known = set(REWARDS.values()) - {REWARDS["environment"]}
        return not all(part.function in known or type(part.function) in known for part in self.components)

    def scorers(self, prompt: Prompt) -> list[str]:
        """Return the names of the components that score the row. Raises ConfigError if it names others, or none."""
        known = [component.name for component in self.components if component.eval_set == prompt.eval_set]
        if self.key is None or prompt.eval_set:
            return known
        from fsdptrain.data.tables import value_in

        value = value_in(prompt.metadata, self.key)
        names: list[Any] = value if isinstance(value, list) and value else [value]
        if all(name in known for name in names):
            return names
        raise ConfigError(
            f"--reward-key {self.key}: row {prompt.id} has {value!r:.80}, --reward has {', '.join(known)}"
        )

    def combine(self, results: Mapping[str, RewardResult]) -> Mapping[str, float]:
        """Return the weighted sum of the results of components by name, each scored, and its parts.

        Parts are the unweighted rewards by name, and the details of components that return mappings. Component names
        take precedence over detail names.
        """
        rewards, details = dict[str, float](), dict[str, float]()
        for name, result in results.items():
            assert result.reward is not None
            rewards[name] = result.reward
            details |= result.rewards
        total = sum(c.weight * rewards[c.name] for c in self.components if c.name in rewards)
        return {**details, **{name: value for name, value in rewards.items() if name}, "reward": total}


def _parse_all(reward: RewardConfig, prompt_data: str, has_environment: bool) -> dict[str, float]:
    """Return the weights of --reward by name. Raises ConfigError for names that are given twice."""
    parts = [_parse(spec, prompt_data, has_environment) for spec in reward.reward]
    if not parts or len(dict(parts)) < len(parts):
        raise ConfigError(f"--reward must name one or more different rewards, got {reward.reward}")
    return dict(parts)


def _parse(spec: str, prompt_data: str, has_environment: bool) -> tuple[str, float]:
    name, equals, text = spec.rpartition("=")
    if not equals:
        name, text = spec, "1"
    is_generated = prompt_data.startswith(GENERATOR)
    if name == "auto":
        other = "environment" if has_environment else "math"
        name = "reasoning_gym" if is_generated else other
    if name == "environment" and not has_environment:
        raise ConfigError("--reward environment: there is no environment; set --environment")
    if name.startswith("reasoning_gym") and not is_generated:
        others = [key for key in REWARDS if not key.startswith("reasoning_gym")]
        raise ConfigError(
            f"--reward {name} scores reasoning_gym:<task> data only, not --prompt-data {prompt_data}; "
            f"use one of {', '.join(others)} or package.module:function"
        )
    return name, _weight(text, spec)


def _function(name: str) -> Any:
    return registry.resolve(name, REWARDS, flag="--reward")


def _short(name: str) -> str:
    """Return the metric name of a reward: the function without its module, unless the name is reserved."""
    function = name.rpartition(":")[2]
    return name.replace(":", ".") if function in RESERVED else function


def _weight(text: str, spec: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise ConfigError(f"--reward {spec}: the weight after = must be a number, got {text!r}")
    return weight
