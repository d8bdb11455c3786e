from dataclasses import replace

import numpy as np
import pytest

from fsdptrain.algo.advantages import (
    ADVANTAGES,
    AdvantageRule,
    assign_advantages,
    scale_over_batch,
    zero_spread_groups,
)
from fsdptrain.algo.estimators import own_estimate
from fsdptrain.config.presets import ADVANTAGE_SCALES
from fsdptrain.errors import ConfigError
from fsdptrain.types import Sample


def sample(group: str, reward: float | None, length: int = 1) -> Sample:
    tokens = length + 1
    return Sample(group, [1] * tokens, [False] + [True] * length, [0.0] * tokens, reward=reward)


def rule(estimator: str) -> AdvantageRule:
    return AdvantageRule(ADVANTAGES[estimator], ADVANTAGE_SCALES[estimator])


def advantages(
    rewards: list[tuple[str, float | None]], estimator: str, lengths: list[int] | None = None
) -> list[float]:
    lengths = lengths or [1] * len(rewards)
    made = [sample(*row, length) for row, length in zip(rewards, lengths, strict=True)]
    return [s.advantage for s in assign_advantages(made, rule(estimator))]


def reference(estimator: str, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    centred = rewards - rewards.mean()
    others = [np.delete(rewards, i).mean() for i in range(len(rewards))]
    return {
        "grpo": centred / (rewards.std(ddof=1) + 1e-6),
        "dr_grpo": centred,
        "rloo": rewards - others,
        "reinforce++_baseline": centred,
        "max_rl": centred / rewards.mean(),
        "opo": rewards - np.average(rewards, weights=lengths),
    }[estimator]


@pytest.mark.parametrize("estimator", sorted(ADVANTAGES))
def test_advantages_equal_their_formula(estimator: str) -> None:
    rng = np.random.default_rng(0)
    rewards, lengths = rng.random(size=(5, 8)), rng.integers(1, 30, size=(5, 8))
    # Groups interleaved, as samples of several groups may stand in any order.
    order = [(g, i) for i in range(8) for g in range(5)]
    flat, long = [(f"g{g}", float(rewards[g, i])) for g, i in order], [int(lengths[g, i]) for g, i in order]
    ours = np.array(advantages(flat, estimator, long)).reshape(8, 5).T
    expected = [reference(estimator, *group) for group in zip(rewards, lengths, strict=True)]
    np.testing.assert_allclose(ours, expected, rtol=1e-12, atol=1e-12)


def test_max_rl_never_turns_the_sign_of_an_advantage() -> None:
    assert advantages([("g", 0.0), ("g", 1.0)], "max_rl") == [-1.0, 1.0]
    assert advantages([("g", -1.0), ("g", -2.0)], "max_rl") == [0.0, 0.0]


def test_opo_without_any_token_is_the_mean() -> None:
    unsaid = [Sample("g", [1], [False], [0.0], reward=reward) for reward in (0.0, 1.0)]
    assert [s.advantage for s in assign_advantages(unsaid, rule("opo"))] == [-0.5, 0.5]


def test_whitened_advantages_have_mean_0_and_variance_1_over_the_tokens() -> None:
    rng = np.random.default_rng(1)
    made = [sample(f"g{i // 4}", float(rng.random()), int(rng.integers(1, 20))) for i in range(24)]
    whitening = rule("reinforce++_baseline")
    whitened = scale_over_batch(assign_advantages([*made, sample("h", None, 7)], whitening), whitening, dict)

    tokens = [s.advantage for s in whitened if s.reward is not None for _ in range(sum(s.loss_mask))]
    assert np.mean(tokens) == pytest.approx(0, abs=1e-12)
    assert np.std(tokens, ddof=1) == pytest.approx(1, rel=1e-6)
    assert [s.advantage for s in whitened if s.reward is None] == [0.0]


@pytest.mark.parametrize("scale", ["whiten", "batch", "none"])
def test_a_batch_without_spread_or_without_samples_stays_as_it_is(scale: str) -> None:
    scaling = AdvantageRule(ADVANTAGES["dr_grpo"], scale)
    flat = assign_advantages([sample("g", 1.0), sample("g", 1.0)], scaling)
    assert scale_over_batch(flat, scaling, dict) == flat
    assert scale_over_batch([], scaling, dict) == []


def test_a_batch_of_equal_rewards_has_no_std_whatever_the_rounding_of_its_mean() -> None:
    """An estimator of one's own need not be 0 there; divided by what rounding leaves it would be a million."""
    scaling = AdvantageRule(lambda rewards, _lengths: [reward - 0.5 for reward in rewards], "batch")
    for count in range(2, 40):
        made = assign_advantages([sample(f"g{i}", 0.1) for i in range(count)], scaling)
        assert {s.advantage for s in scale_over_batch(made, scaling, dict)} == {0.0}


@pytest.mark.parametrize("estimator", sorted(ADVANTAGES))
@pytest.mark.parametrize("rewards", [[0.1] * 3, [0.7], [1e9 + 0.3] * 7])
def test_a_group_without_spread_teaches_exactly_nothing(estimator: str, rewards: list[float]) -> None:
    assert advantages([("g", r) for r in rewards], estimator) == [0.0] * len(rewards)


@pytest.mark.parametrize("estimator", sorted(ADVANTAGES))
def test_an_unscored_sample_gets_zero_and_leaves_its_group_alone(estimator: str) -> None:
    with_hole = advantages([("g", 1.0), ("g", None), ("g", 0.0), ("h", None)], estimator)
    assert with_hole == [*advantages([("g", 1.0), ("g", 0.0)], estimator)[:1], 0.0, *with_hole[2:3], 0.0]
    assert with_hole[2] == -with_hole[0]
    assert with_hole[0] > 0


@pytest.mark.parametrize("estimator", sorted(set(ADVANTAGES) - {"max_rl"}))  # divides by the level
def test_advantages_do_not_move_with_the_level_of_the_rewards(estimator: str) -> None:
    low, high = ([("g", base + x) for x in (0.0, 1.0, 0.5)] for base in (0.0, 10.0))
    np.testing.assert_allclose(advantages(low, estimator), advantages(high, estimator), atol=1e-9)


def test_groups_without_spread_are_counted() -> None:
    rewards = [("a", 1.0), ("a", 1.0), ("b", 1.0), ("b", 0.0), ("c", None), ("c", None), ("d", 1.0), ("d", None)]
    assert zero_spread_groups([sample(*r) for r in rewards]) == (3, 4)


def two_rewards(group: str, math: float, format_: float) -> Sample:
    return replace(sample(group, math + format_), rewards={"math": math, "format": format_})


GDPO = AdvantageRule(ADVANTAGES["grpo"], "group", {"math": 1.0, "format": 1.0})


def test_gdpo_tells_apart_what_a_sum_makes_equal() -> None:
    """As in figure 2 of the paper; the rarer reward counts for more."""
    made = [two_rewards("g", *parts) for parts in ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 0.0))]
    summed = [s.advantage for s in assign_advantages(made, rule("grpo"))]
    apart = [s.advantage for s in assign_advantages(made, GDPO)]
    assert summed[1] == summed[2]  # 1 + 0 = 0 + 1
    assert apart[2] > apart[1] > 0 > apart[0]


def test_a_group_teaches_gdpo_as_long_as_one_reward_has_spread() -> None:
    made = [
        two_rewards("g", 1.0, 0.0),
        two_rewards("g", 0.0, 1.0),
        two_rewards("h", 1.0, 0.5),
        two_rewards("h", 1.0, 0.5),
    ]
    assert zero_spread_groups(made) == (2, 2)
    assert zero_spread_groups(made, ["math", "format"]) == (1, 2)


def test_a_reward_that_a_sample_lacks_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--multi-reward normalize_then_sum needs the reward 'math' of every sample"):
        assign_advantages([sample("g", 1.0)], GDPO)


def best_of(rewards: list[float], lengths: list[int]) -> list[float]:
    return [float(reward == max(rewards)) * length for reward, length in zip(rewards, lengths, strict=True)]


def test_an_estimator_of_ones_own_sees_scored_samples_of_one_group() -> None:
    made = [sample("g", 0.0, 3), sample("h", 2.0, 5), sample("g", None, 9), sample("g", 1.0, 4)]
    own = AdvantageRule(own_estimate(best_of, "tests:best_of"))
    assert [s.advantage for s in assign_advantages(made, own)] == [0.0, 5.0, 0.0, 4.0]


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda rewards, lengths: rewards[1:], r"returned \[2.0\]"),
        (lambda rewards, lengths: [float("nan"), 0.0], r"returned \[nan, 0.0\]"),
        (lambda rewards, lengths: [1 / 0], r"failed for rewards .* ZeroDivisionError: .* \(test_advantages.py:\d+\)"),
        (lambda rewards, lengths: None, "failed for rewards .* TypeError"),
        (lambda rewards: rewards, "failed for rewards .* TypeError"),
        (lambda rewards, lengths: rewards.clear() or lengths, None),  # what it does to its arguments is its own affair
    ],
)
def test_a_mistake_of_an_own_estimator_is_one_line_that_names_it(function, problem) -> None:
    made = [sample("g", 1.0), sample("g", 2.0)]
    own = AdvantageRule(own_estimate(function, "my.module:mine"))
    if problem is None:
        assert [s.advantage for s in assign_advantages(made, own)] == [1.0, 1.0]
        return
    with pytest.raises(ConfigError, match=f"--advantage-estimator my.module:mine {problem}") as caught:
        assign_advantages(made, own)
    assert "\n" not in str(caught.value)
