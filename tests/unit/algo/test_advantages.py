"""Edges of the estimators, estimators of users, and the penalty of length, which changes the training reward.

The formulas: tests/properties/test_advantages.py.
"""

from dataclasses import replace

import pytest

from fsdptrain.algo.advantages import AdvantageRule, assign_advantages, zero_spread_groups
from fsdptrain.algo.estimators import user_estimator
from fsdptrain.algo.shaping import ShapingRule, without_truncated
from fsdptrain.errors import ConfigError
from fsdptrain.types import Sample


def sample(group: str, reward: float | None, length: int = 1) -> Sample:
    tokens = length + 1
    mask = [False] + [True] * length
    return Sample(group, [1] * tokens, mask, [0.0] * tokens, reward=reward, rewards={"math": 0.5})


def test_groups_without_spread_are_counted() -> None:
    rewards = [("a", 1.0), ("a", 1.0), ("b", 1.0), ("b", 0.0), ("c", None), ("c", None), ("d", 1.0), ("d", None)]
    assert zero_spread_groups([sample(*r) for r in rewards]) == (3, 4)


def best_of(rewards: list[float], lengths: list[int]) -> list[float]:
    return [float(reward == max(rewards)) * length for reward, length in zip(rewards, lengths, strict=True)]


def test_a_custom_estimator_gets_the_scored_samples_of_one_group() -> None:
    made = [sample("g", 0.0, 3), sample("h", 2.0, 5), sample("g", None, 9), sample("g", 1.0, 4)]
    own = AdvantageRule(user_estimator(best_of, "tests:best_of"))
    assert [s.advantage for s in assign_advantages(made, own)] == [0.0, 5.0, 0.0, 4.0]


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda rewards, lengths: rewards[1:], r"returned \[2.0\]"),
        (lambda rewards, lengths: [float("nan"), 0.0], r"returned \[nan, 0.0\]"),
        (lambda rewards, lengths: [1 / 0], r"failed for rewards .* ZeroDivisionError: .* \(test_advantages.py:\d+\)"),
        (lambda rewards, lengths: None, "failed for rewards .* TypeError"),
        (lambda rewards: rewards, "failed for rewards .* TypeError"),
        (lambda rewards, lengths: rewards.clear() or lengths, None),  # it may change its arguments
    ],
)
def test_an_error_of_a_custom_estimator_is_one_line_with_its_name(function, problem) -> None:
    made = [sample("g", 1.0), sample("g", 2.0)]
    own = AdvantageRule(user_estimator(function, "my.module:mine"))
    if problem is None:
        assert [s.advantage for s in assign_advantages(made, own)] == [1.0, 1.0]
        return
    with pytest.raises(ConfigError, match=f"--advantage-estimator my.module:mine {problem}") as caught:
        assign_advantages(made, own)
    assert "\n" not in str(caught.value)


DAPO = ShapingRule(max_response_len=20480, overlong_buffer=4096, overlong_penalty=1.0)


@pytest.mark.parametrize(
    ("length", "penalty"), [(100, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (30000, -1.0)]
)
def test_the_overlong_penalty_has_the_values_of_dapo(length: int, penalty: float) -> None:
    (shaped,) = DAPO.apply([sample("g", -1.0, length)])
    assert (shaped.reward, shaped.rewards) == (-1.0 + penalty, {"math": 0.5, "overlong": penalty})


def test_overlong_counts_observations_and_skips_unscored_samples() -> None:
    """Half of the tokens of the episode are observations."""
    episode = replace(sample("g", 0.0, 100), loss_mask=[False] + ([True] * 5 + [False] * 5) * 10)
    shaped = ShapingRule(100, 20, 2.0).apply([episode, sample("g", 1.0, 70), sample("g", None, 90)])
    assert [s.rewards.get("overlong") for s in shaped] == [-1.0, 0.0, None]
    assert [s.reward for s in shaped] == [-2.0, 1.0, None]


def test_a_reward_with_the_name_of_a_penalty_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--reward has a component 'overlong', which is the name of a shaping term"):
        DAPO.apply([replace(sample("g", 1.0, 3), rewards={"overlong": 1.0})])


def test_truncated_samples_are_removed() -> None:
    made = [sample("g", 1.0, 3), replace(sample("g", 1.0, 4), truncated=True), sample("g", 1.0, 5)]
    assert without_truncated(made) == [made[0], made[2]]
