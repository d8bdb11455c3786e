"""From options to the rules by which rewards become advantages."""

import pytest

from fsdptrain.config import Config
from fsdptrain.errors import ConfigError
from fsdptrain.rewards import build_reward
from fsdptrain.trainer.rules import advantage_rule, shaping_rule


def config(**values) -> Config:
    return Config(**{"hf_checkpoint": "x", "prompt_data": "x.jsonl", "reward": ["math=0.9", "format=0.1"], **values})


def rule_of(made: Config):
    return advantage_rule(made, build_reward(made.reward, prompt_data=made.data.prompt_data))


def test_rewards_and_penalties_are_normalised_one_by_one_with_their_weights() -> None:
    made = config(multi_reward="normalize_then_sum", algorithm="dapo", length_penalty=0.2)
    assert rule_of(made).weights == {"math": 0.9, "format": 0.1, "overlong": 1.0, "length": 0.2}
    assert rule_of(config(length_penalty=0.2)).weights is None


def test_only_penalties_that_are_on_shape() -> None:
    assert shaping_rule(config()).coefficients == {}
    assert shaping_rule(config(algorithm="dapo", length_penalty=0.2)).coefficients == {"overlong": 1.0, "length": 0.2}


def test_the_scale_is_that_of_the_estimator_or_the_chosen_one() -> None:
    assert rule_of(config(algorithm="reinforce++_baseline")).scale == "whiten"
    assert rule_of(config(algorithm="reinforce++_baseline", advantage_scale="batch")).scale == "batch"


def test_a_reward_from_python_has_no_parts_to_normalise() -> None:
    with pytest.raises(ConfigError, match=r"--multi-reward normalize_then_sum .* in place of Trainer\(reward=...\)"):
        advantage_rule(config(multi_reward="normalize_then_sum"), lambda prompt, response: 1.0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("statistics:nope", "--advantage-estimator statistics:nope: module 'statistics' has no attribute 'nope'"),
        ("math:pi", "--advantage-estimator math:pi is no function"),
    ],
)
def test_an_estimator_that_cannot_be_is_one_line(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rule_of(config(advantage_estimator=name))
