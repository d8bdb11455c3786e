"""The penalty of length changes the training reward and is reported."""

from dataclasses import replace

import pytest

from fsdptrain.algo.shaping import ShapingRule, without_truncated
from fsdptrain.errors import ConfigError
from fsdptrain.types import Sample

DAPO = ShapingRule(max_response_len=20480, overlong_buffer=4096, overlong_penalty=1.0)


def sample(length: int, reward: float | None = 1.0) -> Sample:
    mask = [False] + [True] * length
    return Sample("g", [1] * (length + 1), mask, [0.0] * (length + 1), reward=reward, rewards={"math": 0.5})


@pytest.mark.parametrize(
    ("length", "penalty"), [(100, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (30000, -1.0)]
)
def test_the_overlong_penalty_has_the_values_of_dapo(length: int, penalty: float) -> None:
    (shaped,) = DAPO.apply([sample(length, reward=-1.0)])
    assert (shaped.reward, shaped.rewards) == (-1.0 + penalty, {"math": 0.5, "overlong": penalty})


def test_overlong_counts_observations_and_skips_unscored_samples() -> None:
    """Half of the tokens of the episode are observations."""
    episode = replace(sample(100, reward=0.0), loss_mask=[False] + ([True] * 5 + [False] * 5) * 10)
    shaped = ShapingRule(100, 20, 2.0).apply([episode, sample(70), sample(90, None)])
    assert [s.rewards.get("overlong") for s in shaped] == [-1.0, 0.0, None]
    assert [s.reward for s in shaped] == [-2.0, 1.0, None]


def test_a_reward_with_the_name_of_a_penalty_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--reward has a component 'overlong', which is the name of a shaping term"):
        DAPO.apply([replace(sample(3), rewards={"overlong": 1.0})])


def test_truncated_samples_are_removed() -> None:
    made = [sample(3), replace(sample(4), truncated=True), sample(5)]
    assert without_truncated(made) == [made[0], made[2]]
