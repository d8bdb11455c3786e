"""Dynamic sampling: kept groups, requested groups, and the end of a rollout."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdptrain.errors import RolloutError
from fsdptrain.trainer.samples.selection import GroupResult, Selection, SelectionRules, likely_enough

SPREADS = st.lists(st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0]), min_size=72, max_size=72)


def group(spread: float) -> GroupResult:
    return GroupResult(owner=0, num_samples=8, num_scored=8, reward_sum=8 * spread, spread=spread)


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


def test_later_rounds_request_less_than_the_first() -> None:
    selection = Selection(SelectionRules(dynamic=True, max_rounds=9), wanted=32)
    selection.add([group(1.0)] * 28 + [group(0.0)] * 4)
    assert 4 < selection.num_to_sample <= 8


def test_without_dynamic_sampling_everything_is_kept_in_one_round() -> None:
    selection = Selection(SelectionRules(), wanted=3)
    assert run(selection, [0.0, 1.0, 0.0]) == [3]
    assert len(selection.kept) == 3
    assert selection.metrics() == {}


def test_no_kept_group_is_an_error_with_the_flags() -> None:
    selection = Selection(SelectionRules(dynamic=True, max_rounds=3), wanted=4)
    run(selection, [0.0] * 12)
    said = r"kept none of 12 groups in 3 rounds: .*mean is 0;.*--dynamic-sampling-max-rounds"
    with pytest.raises(RolloutError, match=said):
        selection.check(0)


@pytest.mark.parametrize(("max_rounds", "lines"), [(1, 0), (2, 1)])
def test_fewer_groups_than_wanted_are_logged_after_several_rounds(max_rounds, lines, caplog) -> None:
    selection = Selection(SelectionRules(dynamic=True, max_rounds=max_rounds), wanted=4)
    run(selection, [1.0, 0.0, 0.0, 1.0] + [0.0] * 4)
    selection.check(6)
    assert [record.getMessage() for record in caplog.records] == [
        "rollout 7 trains on 2 of 4 groups: --dynamic-sampling-max-rounds 2 brought no more"
    ] * lines
