import numpy as np
import pytest

from fsdptrain.algo.advantages import ADVANTAGES, assign_advantages, zero_spread_groups
from fsdptrain.types import Sample


def sample(group: str, reward: float | None) -> Sample:
    return Sample(group, [1, 2], [False, True], [0.0, -1.0], reward=reward)


def advantages(rewards: list[tuple[str, float | None]], estimator: str) -> list[float]:
    return [s.advantage for s in assign_advantages([sample(*r) for r in rewards], estimator)]


def reference(estimator: str, rewards: np.ndarray) -> np.ndarray:
    centred = rewards - rewards.mean()
    return {"grpo": centred / (rewards.std(ddof=1) + 1e-6), "dr_grpo": centred}[estimator]


@pytest.mark.parametrize("estimator", sorted(ADVANTAGES))
def test_advantages_equal_their_formula(estimator: str) -> None:
    rewards = np.random.default_rng(0).normal(size=(5, 8))
    # Groups interleaved, as samples of several groups may stand in any order.
    flat = [(f"g{g}", float(rewards[g, i])) for i in range(8) for g in range(5)]
    ours = np.array(advantages(flat, estimator)).reshape(8, 5).T
    np.testing.assert_allclose(ours, [reference(estimator, group) for group in rewards], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("estimator", sorted(ADVANTAGES))
@pytest.mark.parametrize("rewards", [[0.1] * 3, [0.7], [1e9 + 0.3] * 7])
def test_a_group_without_spread_teaches_exactly_nothing(estimator: str, rewards: list[float]) -> None:
    assert advantages([("g", r) for r in rewards], estimator) == [0.0] * len(rewards)


@pytest.mark.parametrize("estimator", sorted(ADVANTAGES))
def test_an_unscored_sample_gets_zero_and_leaves_its_group_alone(estimator: str) -> None:
    with_hole = advantages([("g", 1.0), ("g", None), ("g", 0.0), ("h", None)], estimator)
    assert with_hole == [*advantages([("g", 1.0)] + [("g", 0.0)], estimator)[:1], 0.0, *with_hole[2:3], 0.0]
    assert with_hole[2] == -with_hole[0]
    assert with_hole[0] > 0


@pytest.mark.parametrize("estimator", sorted(ADVANTAGES))
def test_advantages_do_not_move_with_the_level_of_the_rewards(estimator: str) -> None:
    low, high = ([("g", base + x) for x in (0.0, 1.0, 0.5)] for base in (0.0, 10.0))
    np.testing.assert_allclose(advantages(low, estimator), advantages(high, estimator), atol=1e-9)


def test_groups_without_spread_are_counted() -> None:
    rewards = [("a", 1.0), ("a", 1.0), ("b", 1.0), ("b", 0.0), ("c", None), ("c", None), ("d", 1.0), ("d", None)]
    assert zero_spread_groups([sample(*r) for r in rewards]) == (3, 4)
