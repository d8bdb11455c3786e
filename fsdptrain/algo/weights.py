"""Token weights. This is the only module that computes loss denominators.

A loss is `sum(loss_weights * per_token)` over packs and ranks, without further division. The gradient therefore does
not depend on packing, on the number of micro-batches or on the number of ranks. Notation: T_i loss tokens of sequence
i, N_tok and N_seq loss tokens and sequences of the WHOLE optimizer step over all ranks, L_max the response limit.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fsdptrain.types import Sample


@dataclass(frozen=True)
class Totals:
    """Denominators of one optimizer step over all ranks, counted before masking and rejection."""

    num_tokens: int  # loss tokens
    num_sequences: int  # sequences with at least one loss token
    num_skipped: int = 0  # of `num_tokens`, those of sequences in no pack


def num_loss_tokens(sample: Sample) -> int:
    """Return the number of trained tokens. The first token is never predicted, so its mask is ignored."""
    return sum(sample.loss_mask[1:])


def count_totals(loss_tokens: Sequence[int]) -> Totals:
    """Compute totals from the loss token counts of all sequences of the optimizer step."""
    return Totals(num_tokens=sum(loss_tokens), num_sequences=sum(count > 0 for count in loss_tokens))


def token_weight(aggregation: str, *, loss_tokens: int, totals: Totals, max_response_len: int) -> float:
    """Return the weight of each loss token in a sequence with `loss_tokens` (T_i >= 1) of them."""
    assert 0 < loss_tokens <= totals.num_tokens, "totals must count the whole optimizer step"
    return AGGREGATIONS[aggregation](loss_tokens, totals, max_response_len)


def _token_mean(_loss_tokens: int, totals: Totals, _max_response_len: int) -> float:
    """1 / N_tok: equal weight for all tokens (DAPO, arXiv 2503.14476)."""
    return 1 / totals.num_tokens


def _sequence_mean(loss_tokens: int, totals: Totals, _max_response_len: int) -> float:
    """1 / (N_seq T_i): equal weight for all sequences, less weight for tokens of long ones (GRPO, arXiv 2402.03300)."""
    return 1 / (totals.num_sequences * loss_tokens)


def _fixed_length(_loss_tokens: int, totals: Totals, max_response_len: int) -> float:
    """1 / (N_seq L_max): independent of the length, so long answers are not favored (Dr.GRPO, arXiv 2503.20783)."""
    return 1 / (totals.num_sequences * max_response_len)


def _sequence_sum(_loss_tokens: int, totals: Totals, _max_response_len: int) -> float:
    """1 / N_seq: weight proportional to length, as REINFORCE is derived. The gradient grows with the length."""
    return 1 / totals.num_sequences


AGGREGATIONS: Mapping[str, Callable[[int, Totals, int], float]] = {
    "token_mean": _token_mean,
    "sequence_mean": _sequence_mean,
    "fixed_length": _fixed_length,
    "sequence_sum": _sequence_sum,
}
