"""Weights of tokens, and the totals that they divide by."""

import pytest

from fsdptrain.algo.weights import Totals, count_totals, num_loss_tokens, token_weight
from fsdptrain.types import Sample


@pytest.mark.parametrize(
    ("aggregation", "weight"),
    [("token_mean", 1 / 30), ("sequence_mean", 1 / (4 * 5)), ("fixed_length", 1 / (4 * 100)), ("sequence_sum", 1 / 4)],
)
def test_weights_of_aggregations(aggregation: str, weight: float) -> None:
    totals = Totals(num_tokens=30, num_sequences=4)
    assert token_weight(aggregation, loss_tokens=5, totals=totals, max_response_len=100) == weight


def test_totals_count_sequences_that_have_a_loss() -> None:
    assert count_totals([5, 0, 7]) == Totals(num_tokens=12, num_sequences=2)


def test_the_first_token_is_never_a_loss_token() -> None:
    assert num_loss_tokens(Sample("g", [1, 2, 3], [True, True, False], [0.0] * 3)) == 1
