"""The curriculum draws rows by pass rate, resumes exactly, and never blocks a stream."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdptrain.config import DataConfig, RolloutConfig
from fsdptrain.data.curriculum import PassRates
from fsdptrain.data.prompts import PromptStream
from fsdptrain.data.rows import Row
from tests.testing import tiny_tokenizer

NUM_SAMPLES = 8
TOKENIZER = tiny_tokenizer()


def stream(num_rows: int = 9, *, floor: float = 0.1, decay: float = 1.0, long_rows: int = 0) -> PromptStream:
    rows = [Row(f"r:{i}", f"question {i}", label=i) for i in range(num_rows)]
    rows += [Row(f"long:{i}", "a" * 90 + str(i)) for i in range(long_rows)]
    return PromptStream(
        rows,
        TOKENIZER,
        data=DataConfig(prompt_data="x"),
        rollout=RolloutConfig(seed=3),
        max_prompt_len=40,
        curriculum=PassRates(len(rows), floor=floor, decay=decay),
    )


def take(prompts: PromptStream, count: int) -> list[str]:
    """Draw and record, four at a time (row i passes i of 8 times). Return the ids."""
    asked: list[str] = []
    for _ in range(count // 4):
        batch = prompts.next(4)
        for prompt in batch:
            prompts.record(prompt, passed=prompt.label, tried=NUM_SAMPLES)
        asked += [prompt.id for prompt in batch]
    return asked


def epoch_and_row(prompt_id: str) -> tuple[int, str]:
    row, _, epoch = prompt_id.partition("@")
    return int(epoch or 0), row


def test_rows_are_drawn_with_the_frequency_of_their_weight() -> None:
    """Rows of 0, 1/8 ... 8/8 over thousands of epochs: within four standard deviations of max(floor, 4 p (1 - p))."""
    prompts = stream()
    take(prompts, 2000)  # until the rates are known
    first = prompts.epoch + 1
    asked = [epoch_and_row(prompt_id) for prompt_id in take(prompts, 6000)]
    num_epochs = prompts.epoch - first
    assert num_epochs > 1000
    for i in range(9):
        p = i / NUM_SAMPLES
        chance = max(0.1, 4 * p * (1 - p))
        share = sum(row == f"r:{i}" and first <= epoch < prompts.epoch for epoch, row in asked) / num_epochs
        assert share == pytest.approx(chance, abs=4 * math.sqrt(chance * (1 - chance) / num_epochs) + 0.01), i


def test_a_row_is_drawn_once_per_epoch_at_most_and_unseen_rows_always() -> None:
    asked = [epoch_and_row(prompt_id) for prompt_id in take(stream(), 400)]
    assert len(set(asked)) == len(asked)
    assert asked == sorted(asked, key=lambda pair: pair[0])
    assert {row for epoch, row in asked if epoch == 0} == {f"r:{i}" for i in range(9)}


@pytest.mark.parametrize("stop", [0, 4, 8, 12, 40, 196])
def test_a_resumed_curriculum_equals_an_uninterrupted_one(stop: int) -> None:
    whole = stream(decay=0.3)
    expected = take(whole, 240)
    first, second = stream(decay=0.3), stream(decay=0.3)
    begun = take(first, stop)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert begun + take(second, 240 - stop) == expected
    assert second.state_dict() == whole.state_dict()


visits = st.lists(
    st.tuples(st.integers(0, 19), st.integers(0, 16), st.integers(0, 16)).map(lambda v: (v[0], min(v[1:]), max(v[1:]))),
    max_size=60,
)


@settings(deadline=None)
@given(visits=visits, decay=st.sampled_from([0.0, 0.3, 0.5, 1.0]), floor=st.floats(0.01, 1.0))
def test_state_and_weights_are_the_same_to_the_bit_after_a_round_trip(visits, decay, floor) -> None:
    rates, again = (PassRates(20, floor=floor, decay=decay) for _ in range(2))
    again.record(7, passed=1, tried=3)  # what the state does not know is forgotten
    for row, passed, tried in visits:
        rates.record(row, passed=passed, tried=tried)
    again.load_state_dict(json.loads(json.dumps(rates.state_dict())))
    assert [again.weight(row) for row in range(20)] == [rates.weight(row) for row in range(20)]
    assert all(floor <= rates.weight(row) <= 1 for row in range(20))
    assert again.mean_rate == rates.mean_rate
    tried_rows = {row for row, _, tried in visits if tried}
    assert again.seen_fraction == len(tried_rows) / 20
    assert all(rates.weight(row) == 1 for row in set(range(20)) - tried_rows)


def test_older_results_decay() -> None:
    rates = PassRates(3, floor=0.01, decay=0.5)
    for passed in (0, 0, 0, 8):
        rates.record(0, passed=passed, tried=8)
    assert rates.mean_rate == pytest.approx((8 + 0.5) / (8 + 4 + 2 + 1 + 1))


def test_the_state_of_many_rows_is_small() -> None:
    rates = PassRates(1_000_000, floor=0.1, decay=0.5)
    assert len(json.dumps(rates.state_dict())) < 200
    for row in range(0, 1_000_000, 10):
        rates.record(row, passed=row % 9, tried=8)
    assert len(json.dumps(rates.state_dict())) < 100_000


def test_a_rarely_drawn_row_is_drawn_among_unusable_rows() -> None:
    """One row that is always solved among nine that are too long: its turn comes, however rarely."""
    prompts = stream(num_rows=1, long_rows=9)
    asked = []
    for _ in range(20):
        (prompt,) = prompts.next(1)
        prompts.record(prompt, passed=8, tried=8)
        asked.append(prompt.id)
    assert len(set(asked)) == 20
    assert prompts.epoch > 60


def test_metrics_are_those_of_the_rollout() -> None:
    prompts = stream(num_rows=4)
    take(prompts, 4)
    first = prompts.metrics()
    assert first["curriculum/skipped_fraction"] == 0
    assert first["curriculum/seen_fraction"] == 1
    assert first["curriculum/mean_pass_rate"] == pytest.approx((0.5 + 1.5 + 2.5 + 3.5) / 4 / 9)
    before = prompts.epoch * 4 + prompts.position
    take(prompts, 8)
    looked_at = prompts.epoch * 4 + prompts.position - before
    assert prompts.metrics()["curriculum/skipped_fraction"] == pytest.approx(1 - 8 / looked_at)


def test_a_stream_without_a_curriculum_has_no_state_or_metrics_of_it() -> None:
    plain = PromptStream([Row("r", "q")], TOKENIZER, data=DataConfig(prompt_data="x"), rollout=RolloutConfig())
    plain.record(plain.next(1)[0], passed=1, tried=1)
    assert plain.metrics() == {}
    assert "curriculum" not in plain.state_dict()
    begun = stream(num_rows=1)
    begun.load_state_dict(plain.state_dict())  # switched on in the middle of a run
    plain.load_state_dict(begun.state_dict())  # and off again
    assert begun.metrics()["curriculum/seen_fraction"] == 0
