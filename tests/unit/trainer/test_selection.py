"""Dynamic sampling: kept groups, requested groups, and the end of a rollout."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdptrain.trainer.samples.selection import GroupResult, Selection, SelectionRules, likely_enough

SPREADS = st.lists(st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0]), min_size=72, max_size=72)


def group(spread: float) -> GroupResult:
    return GroupResult(owner=0, num_scored=8, reward_sum=8 * spread, spread=spread)


def run(selection: Selection, spreads: list[float]) -> list[int]:
    """Feed the stream to the end of the rollout; the number of prompts in each round."""
    asked: list[int] = []
    while selection.needs_round:
        asked.append(selection.num_to_sample)
        selection.add([group(spreads.pop(0)) for _ in range(asked[-1])])
    return asked


@settings(deadline=None)
@given(spreads=SPREADS, wanted=st.integers(1, 12), max_rounds=st.integers(1, 6))
def test_the_first_groups_with_spread_are_kept(spreads, wanted, max_rounds) -> None:
    selection = Selection(SelectionRules(dynamic=True, max_rounds=max_rounds), wanted=wanted)
    asked = run(selection, list(spreads))
    seen = spreads[: sum(asked)]
    useful = [spread for spread in seen if spread > 0]
    assert [kept.spread for kept in selection.kept] == useful[:wanted]
    assert len(asked) == selection.rounds <= max_rounds
    assert all(1 <= count <= wanted for count in asked)
    assert len(selection.kept) == wanted or selection.rounds == max_rounds
    metrics = selection.metrics()
    kept = metrics["selection/kept_fraction"] * len(seen)
    flat = len(seen) - len(useful)
    assert kept + metrics["selection/surplus_groups"] + flat == pytest.approx(len(seen))
    assert metrics["selection/missing_groups"] == wanted - len(selection.kept)
    assert metrics["selection/generated_groups"] == len(seen)
    assert metrics["selection/reward_mean"] == pytest.approx(math.fsum(seen) / len(seen))
    assert metrics["group/zero_std_fraction"] == seen.count(0.0) / len(seen)


@settings(deadline=None)
@given(missing=st.integers(1, 500), rate=st.floats(0.002, 1.0))
def test_a_later_round_requests_the_likely_number_of_groups(missing: int, rate: float) -> None:
    def lower_end(count: int) -> float:
        return count * rate - math.sqrt(count * rate * (1 - rate))

    count = likely_enough(missing, rate)
    assert lower_end(count) >= missing - 1e-6
    assert lower_end(count - 1) < missing


def test_without_dynamic_sampling_everything_is_kept_in_one_round() -> None:
    selection = Selection(SelectionRules(), wanted=3)
    assert run(selection, [0.0, 1.0, 0.0]) == [3]
    assert len(selection.kept) == 3
    assert selection.metrics() == {}
