"""Penalties of length change the training reward and are reported."""

from dataclasses import replace

import pytest

from fsdptrain.algo.shaping import ShapingRule, shape, without_truncated
from fsdptrain.errors import ConfigError
from fsdptrain.types import Sample

DAPO = ShapingRule(max_response_len=20480, overlong_buffer=4096, coefficients={"overlong": 1.0})


def sample(length: int, reward: float | None = 1.0, group: str = "g") -> Sample:
    mask = [False] + [True] * length
    return Sample(group, [1] * (length + 1), mask, [0.0] * (length + 1), reward=reward, rewards={"math": 0.5})


@pytest.mark.parametrize(
    ("length", "penalty"), [(100, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (30000, -1.0)]
)
def test_the_overlong_penalty_has_the_values_of_dapo(length: int, penalty: float) -> None:
    (shaped,) = shape([sample(length, reward=-1.0)], DAPO)
    assert (shaped.reward, shaped.rewards) == (-1.0 + penalty, {"math": 0.5, "overlong": penalty})


def test_overlong_counts_observations_and_length_does_not() -> None:
    """Half of the tokens are observations. They count for the limit, but not for the length reward."""
    episode = replace(sample(100, reward=0.0), loss_mask=[False] + ([True] * 5 + [False] * 5) * 10)
    rule = ShapingRule(100, 20, {"overlong": 1.0, "length": 1.0})
    shaped = shape([episode, sample(70)], rule)
    assert [s.rewards["overlong"] for s in shaped] == [-1.0, 0.0]
    assert [s.rewards["length"] for s in shaped] == [0.0, -0.5]


def test_the_length_reward_has_the_values_of_kimi() -> None:
    """Right answers from +0.5 for the shortest to -0.5 for the longest; wrong ones gain nothing by being short."""
    rule = ShapingRule(100, 20, {"length": 0.2})
    made = [
        sample(10, 1.0),
        sample(20, 0.0),
        sample(30, 1.0),
        sample(30, 0.0),
        sample(15, 0.0),
        sample(99, 1.0, "other"),
    ]
    shaped = shape(made, rule)
    assert [s.rewards["length"] for s in shaped] == [0.5, 0.0, -0.5, -0.5, 0.0, 0.0]
    assert [s.reward for s in shaped] == pytest.approx([1.1, 0.0, 0.9, -0.1, 0.0, 1.0])


def test_a_response_is_correct_from_the_pass_threshold_on() -> None:
    made = [sample(10, 0.6), sample(20, 0.4), sample(30, 0.6)]
    shaped = shape(made, ShapingRule(100, 20, {"length": 1.0}, pass_threshold=0.4))
    assert [s.rewards["length"] for s in shaped] == [0.5, 0.0, -0.5]
    assert [s.rewards["length"] for s in shape(made, ShapingRule(100, 20, {"length": 1.0}))] == [0.0, 0.0, -0.5]


def test_unscored_samples_are_ignored_by_shaping() -> None:
    made = [sample(10), sample(20), sample(90, None)]
    shaped = shape(made, ShapingRule(100, 20, {"length": 1.0, "overlong": 2.0}))
    assert shaped[2] == made[2]
    assert [s.rewards["length"] for s in shaped[:2]] == [0.5, -0.5]


def test_without_a_penalty_nothing_changes() -> None:
    made = [sample(10), sample(20, None)]
    assert shape(made, ShapingRule(100, 20, {})) == made


def test_a_reward_with_the_name_of_a_penalty_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--reward has a component 'overlong', which is the name of a shaping term"):
        shape([replace(sample(3), rewards={"overlong": 1.0})], DAPO)


def test_truncated_samples_are_removed() -> None:
    made = [sample(3), replace(sample(4), truncated=True), sample(5)]
    assert without_truncated(made) == [made[0], made[2]]
