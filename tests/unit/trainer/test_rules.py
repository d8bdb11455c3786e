"""Options become rules for advantages and shaping."""

import pytest

from fsdptrain.config import Config
from fsdptrain.errors import ConfigError
from fsdptrain.trainer.samples.build import advantage_rule, shaping_rule


def config(**values) -> Config:
    return Config(**{"hf_checkpoint": "x", "prompt_data": "x.jsonl", "reward": ["math=0.9", "format=0.1"], **values})


def test_only_enabled_penalties_shape() -> None:
    assert shaping_rule(config()) is None
    assert shaping_rule(config(algorithm="dapo")).overlong_penalty == 1.0


def test_the_scale_is_that_of_the_estimator_by_default() -> None:
    assert advantage_rule(config(algorithm="reinforce++_baseline")).scale == "whiten"
    assert advantage_rule(config(algorithm="reinforce++_baseline", advantage_scale="batch")).scale == "batch"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("statistics:nope", "--advantage-estimator statistics:nope: module 'statistics' has no attribute 'nope'"),
        ("math:pi", "--advantage-estimator math:pi is not a function"),
    ],
)
def test_an_invalid_estimator_is_one_line(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        advantage_rule(config(advantage_estimator=name))
