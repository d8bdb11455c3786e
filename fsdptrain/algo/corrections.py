"""Corrections for the mismatch between the sampling engine and the trainer.

w = exp(lo - lr), per token or per sequence, bounded and without gradient, multiplies the policy loss before
aggregation. Denominators do not change: rejected tokens still count. If engine and trainer agree, every w is 1. KL and
entropy terms are not weighted. In sequence-level losses (gspo), the weight of a token scales its part of the
gradient; a rejected token contributes none.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdptrain.algo.metrics import fraction_outside, mismatch
from fsdptrain.algo.sequences import sequence_mean, sequence_sum
from fsdptrain.algo.tokens import LossTokens, clamped
from fsdptrain.types import LossConfig


@dataclass(frozen=True)
class Correction:
    """Weighting scheme: the ratio to use and the treatment of values outside the bounds (MISMATCH_BOUNDS)."""

    log_ratio: Callable[[LossTokens, Tensor], Tensor]  # from per-token log w, [M] -> [M]
    bounded: Callable[[Tensor, float, float], Tensor]  # (w [M], low, high) -> weights [M]
    formula: str
    source: str


def corrected(tokens: LossTokens, policy: Tensor, config: LossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the weighted loss of each token, [M], and the metrics that differ from those of uncorrected losses.

    The weights are in [0, mismatch_high], without gradient.
    """
    correction = CORRECTIONS[config.mismatch_correction]
    ratio = clamped(correction.log_ratio(tokens, mismatch(tokens, config))).exp()
    metrics = {"mismatch/out_of_bounds": fraction_outside(tokens, ratio, config)}
    weights = correction.bounded(ratio, *config.mismatch_bounds)
    return weights * policy, metrics


def _of_token(_tokens: LossTokens, log_w: Tensor) -> Tensor:
    return log_w


def _masked(w: Tensor, low: float, high: float) -> Tensor:
    return torch.where((w >= low) & (w <= high), w, 0.0)


CORRECTIONS: Mapping[str, Correction] = {
    "none": Correction(_of_token, lambda w, *_: torch.ones_like(w), "1", "same bounds as mismatch/out_of_bounds"),
    "tis": Correction(_of_token, torch.clamp, "clamp(w_t, low, high)", "truncated importance sampling, 2025"),
    "tis_sequence": Correction(
        sequence_sum, torch.clamp, "clamp(exp(sum_t log w_t), low, high)", "the same for whole sequences"
    ),
    "mis": Correction(_of_token, _masked, "w_t inside [low, high], else 0", "masked importance sampling"),
    "mis_sequence": Correction(
        sequence_mean,
        _masked,
        "exp(mean_t log w_t) inside [low, high], else 0",
        "the same by the geometric mean of a sequence; its bounds are our choice",
    ),
    "icepop": Correction(_of_token, _masked, "w_t inside [low, high], else 0", "IcePop, arXiv 2510.18855"),
}
