"""Corrections for the mismatch between the sampling engine and the trainer.

w = exp(lo - lr), per token or per sequence, bounded and without gradient, multiplies the policy loss before
aggregation. Denominators do not change: rejected tokens still count. If engine and trainer agree, every w is 1. KL and
entropy terms are not weighted. In sequence-level losses (gspo, gmpo), the weight of a token scales its part of the
gradient; a rejected token contributes none.

A rejection can be combined with any of these weights. It sets them to 0 where an estimate of KL(engine || trainer), per
token or per sequence, is too large. With `use_rollout_logprobs`, where lo is lr, the trainer's logprobs are those of
the current policy, l.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdptrain.algo.kl import KL_ESTIMATORS
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


@dataclass(frozen=True)
class RejectionLevel:
    """Statistic, computed from per-token estimates, that is compared with the rejection bound."""

    statistic: Callable[[LossTokens, Tensor], Tensor]  # [M] -> [M]; its absolute value is compared
    formula: str


def corrected(tokens: LossTokens, policy: Tensor, config: LossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the weighted loss of each token, [M], and the metrics that differ from those of uncorrected losses.

    The weights are in [0, mismatch_high], without gradient.
    """
    correction = CORRECTIONS[config.mismatch_correction]
    ratio = clamped(correction.log_ratio(tokens, mismatch(tokens, config))).exp()
    metrics = {"mismatch/out_of_bounds": fraction_outside(tokens, ratio, config)}
    weights = correction.bounded(ratio, *config.mismatch_bounds)
    if config.mismatch_rejection != "none":
        dropped = rejected(tokens, config)
        metrics["mismatch/rejected"] = (tokens.shares * dropped).sum()
        weights = torch.where(dropped, 0.0, weights)
    return weights * policy, metrics


def rejected(tokens: LossTokens, config: LossConfig) -> Tensor:
    """Return where the statistic of --mismatch-rejection exceeds its bound. [M] bool"""
    level, _, estimator = config.mismatch_rejection.rpartition("_")
    values = KL_ESTIMATORS[estimator](clamped(-mismatch(tokens, config)))  # the engine sampled the tokens
    return REJECTION_LEVELS[level].statistic(tokens, values).abs() > (config.mismatch_rejection_max or 0.0)


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
REJECTION_ESTIMATORS = ("k1", "k3")
REJECTION_LEVELS: Mapping[str, RejectionLevel] = {
    "token": RejectionLevel(_of_token, "abs(k_t)"),
    "seq_mean": RejectionLevel(sequence_mean, "abs(mean_t k_t)"),
    "seq_sum": RejectionLevel(sequence_sum, "abs(sum_t k_t)"),
}
