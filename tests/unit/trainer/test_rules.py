"""Options become rules for advantages, shaping and selection."""

import pytest

from fsdptrain.config import Config
from fsdptrain.errors import ConfigError
from fsdptrain.rewards.build import build_reward
from fsdptrain.trainer.rules import advantage_rule, selection_rules, shaping_rule
from fsdptrain.trainer.samples.selection import group_result
from fsdptrain.types import Sample


def config(**values) -> Config:
    return Config(**{"hf_checkpoint": "x", "prompt_data": "x.jsonl", "reward": ["math=0.9", "format=0.1"], **values})


def rule_of(made: Config):
    return advantage_rule(made, build_reward(made.reward, prompt_data=made.data.prompt_data))


def test_rewards_and_penalties_have_weights_of_their_own() -> None:
    made = config(multi_reward="normalize_then_sum", algorithm="dapo", length_penalty=0.2)
    assert rule_of(made).weights == {"math": 0.9, "format": 0.1, "overlong": 1.0, "length": 0.2}
    assert rule_of(config(length_penalty=0.2)).weights is None


def test_a_group_is_kept_if_any_weighted_reward_differs() -> None:
    """(1, 0) and (0, 1) have one sum, and GDPO tells them apart. A reward of weight 0 teaches nothing."""
    made = config(algorithm="dapo", reward=["math", "format", "exact=0"])
    apart = config(algorithm="dapo", reward=["math", "format", "exact=0"], multi_reward="normalize_then_sum")
    rewards = [{"math": 1.0, "format": 0.0, "exact": 5.0}, {"math": 0.0, "format": 1.0, "exact": 0.0}]
    group = [Sample("g", [1], [True], [0.0], reward=1.0, rewards=parts) for parts in rewards]
    assert group_result(group, selection_rules(made, rule_of(made)), owner=0).spread == 0
    rules = selection_rules(apart, rule_of(apart))
    assert rules.parts == ("math", "format")
    assert group_result(group, rules, owner=0).spread == 1
    assert group_result(group[:1] * 2, rules, owner=0).spread == 0


def test_only_enabled_penalties_shape() -> None:
    assert shaping_rule(config()) is None
    both = shaping_rule(config(algorithm="dapo", length_penalty=0.2, pass_threshold=0.7))
    assert both.coefficients == {"overlong": 1.0, "length": 0.2}
    assert both.pass_threshold == 0.7


def test_the_scale_is_that_of_the_estimator_by_default() -> None:
    assert rule_of(config(algorithm="reinforce++_baseline")).scale == "whiten"
    assert rule_of(config(algorithm="reinforce++_baseline", advantage_scale="batch")).scale == "batch"


def test_a_python_reward_has_no_parts_to_normalize() -> None:
    with pytest.raises(ConfigError, match=r"--multi-reward normalize_then_sum .* in place of Trainer\(reward=...\)"):
        advantage_rule(config(multi_reward="normalize_then_sum"), lambda prompt, response: 1.0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("statistics:nope", "--advantage-estimator statistics:nope: module 'statistics' has no attribute 'nope'"),
        ("math:pi", "--advantage-estimator math:pi is not a function"),
    ],
)
def test_an_invalid_estimator_is_one_line(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rule_of(config(advantage_estimator=name))
