"""How tokens are weighted: the one place that knows a denominator.

A loss is `sum(loss_weights * per_token)` over packs and ranks; nothing is divided afterwards. So the gradient cannot
depend on how samples were packed, on the number of micro-batches or on the number of ranks. Notation:
T_i loss tokens of sequence i, N_tok and N_seq those of the WHOLE optimizer step over every rank, L_max the longest
response.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fsdptrain.types import Sample


@dataclass(frozen=True)
class Totals:
    """The denominators of one optimizer step over every rank, counted before anything is masked out or rejected."""

    num_tokens: int  # loss tokens
    num_sequences: int  # sequences with at least one loss token


def num_loss_tokens(sample: Sample) -> int:
    """Tokens of `sample` that are trained on. The first token has no prediction, so its mask never counts."""
    return sum(sample.loss_mask[1:])


def count_totals(loss_tokens: Sequence[int]) -> Totals:
    """The totals of sequences with so many loss tokens each: those of the whole optimizer step."""
    return Totals(num_tokens=sum(loss_tokens), num_sequences=sum(count > 0 for count in loss_tokens))


def token_weight(aggregation: str, *, loss_tokens: int, totals: Totals, max_response_len: int) -> float:
    """The weight of each loss token of a sequence that has `loss_tokens` (T_i, at least 1) of them."""
    assert 0 < loss_tokens <= totals.num_tokens, "totals must count the whole optimizer step"
    return AGGREGATIONS[aggregation](loss_tokens, totals, max_response_len)


def _token_mean(_loss_tokens: int, totals: Totals, _max_response_len: int) -> float:
    """1 / N_tok: every token counts the same (DAPO, arXiv 2503.14476)."""
    return 1 / totals.num_tokens


def _sequence_mean(loss_tokens: int, totals: Totals, _max_response_len: int) -> float:
    """1 / (N_seq T_i): every sequence counts the same, a token of a long one less (GRPO, arXiv 2402.03300)."""
    return 1 / (totals.num_sequences * loss_tokens)


def _fixed_length(_loss_tokens: int, totals: Totals, max_response_len: int) -> float:
    """1 / (N_seq L_max): the length does not matter, so long answers are not favoured (Dr.GRPO, arXiv 2503.20783)."""
    return 1 / (totals.num_sequences * max_response_len)


def _sequence_sum(_loss_tokens: int, totals: Totals, _max_response_len: int) -> float:
    """1 / N_seq: a sequence counts by its length, as REINFORCE is derived. The gradient grows with the length."""
    return 1 / totals.num_sequences


AGGREGATIONS: Mapping[str, Callable[[int, Totals, int], float]] = {
    "token_mean": _token_mean,
    "sequence_mean": _sequence_mean,
    "fixed_length": _fixed_length,
    "sequence_sum": _sequence_sum,
}
