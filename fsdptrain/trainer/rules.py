"""Build the rules for group selection, reward shaping and advantages from the configuration."""

from typing import TYPE_CHECKING

from fsdptrain import registry
from fsdptrain.algo.advantages import ADVANTAGES, AdvantageRule
from fsdptrain.config import Config
from fsdptrain.errors import ConfigError
from fsdptrain.trainer.samples.selection import SelectionRules

if TYPE_CHECKING:
    from fsdptrain.algo.shaping import ShapingRule


def shaping_rule(config: Config) -> "ShapingRule | None":
    """Build the rule that shapes rewards by length. None without --overlong-penalty."""
    if not config.shaping.overlong_penalty:
        return None
    from fsdptrain.algo.shaping import ShapingRule

    return ShapingRule(
        max_response_len=config.rollout.max_response_len,
        overlong_buffer=config.overlong_buffer,
        overlong_penalty=config.shaping.overlong_penalty,
    )


def advantage_rule(config: Config) -> AdvantageRule:
    """Build the rule that turns rewards into advantages.

    Raises ConfigError if the estimator cannot be imported or is not a function.
    """
    name = config.algorithm.advantage_estimator
    estimate = registry.resolve(name, ADVANTAGES, flag="--advantage-estimator", call=lambda f: f("rewards", "lengths"))
    if not callable(estimate):
        raise ConfigError(f"--advantage-estimator {name} is not a function: it is (rewards, lengths) -> advantages")
    if name not in ADVANTAGES:
        from fsdptrain.algo.estimators import user_estimator

        estimate = user_estimator(estimate, name)
    return AdvantageRule(estimate, config.advantage_scale)


def selection_rules(config: Config) -> SelectionRules:
    """Build the rules that select groups, which are judged before shaping."""
    selection = config.selection
    if not selection.dynamic_sampling:
        return SelectionRules()
    return SelectionRules(
        dynamic=True,
        max_rounds=selection.dynamic_sampling_max_rounds,
        min_spread=selection.min_group_spread,
    )
