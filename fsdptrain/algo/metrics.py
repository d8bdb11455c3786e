"""Metrics of losses.

Metrics are divided by the loss tokens in the packs of the whole optimizer step, so their sums over packs and ranks are
means over the tokens that are trained. The emitted names depend only on the configuration, so every pack on every rank
emits the same names.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fsdptrain.algo.kl import k3
from fsdptrain.algo.tokens import LossTokens, clamped
from fsdptrain.types import LossConfig, Metrics


def policy_metrics(
    tokens: LossTokens, *, ratio: Tensor, log_ratio: Tensor, clipped_low: Tensor, clipped_high: Tensor
) -> dict[str, Tensor]:
    """Return ratio, clipping and KL metrics. `ratio` is the ratio in the loss, `log_ratio` that of the tokens.

    Clipped tokens are those whose gradient the clip removes (cispo: reduces): tokens beyond the bound in the direction
    that their advantage pushes.
    """
    return {
        "policy/ratio_mean": (tokens.shares * ratio).sum(),
        "policy/clip_fraction_low": (tokens.shares * clipped_low).sum(),
        "policy/clip_fraction_high": (tokens.shares * clipped_high).sum(),
        "policy/approx_kl": (tokens.shares * k3(-log_ratio)).sum(),  # KL(old || current): the old policy sampled
    }


def mismatch_metrics(tokens: LossTokens, config: LossConfig) -> dict[str, Tensor]:
    """Trainer versus engine at the same weights, w = exp(lo - lr); `use_rollout_logprobs` replaces lo by l.

    Sequence corrections take w of the sequence for out_of_bounds.
    """
    difference = mismatch(tokens, config)
    distance, log_w = difference.abs(), clamped(difference)
    w = log_w.exp()
    return {
        "mismatch/abs_mean": (tokens.shares * distance).sum(),
        "mismatch/abs_max": torch.where(tokens.shares > 0, distance, 0.0).max(),
        "mismatch/k3": (tokens.shares * k3(-log_w)).sum(),  # KL(rollout || trainer): tokens were sampled by the engine
        "mismatch/out_of_bounds": fraction_outside(tokens, w, config),
        "mismatch/_w_mean": (tokens.shares * w).sum(),
        "mismatch/_w2_mean": (tokens.shares * w.square()).sum(),
    }


def mismatch(tokens: LossTokens, config: LossConfig) -> Tensor:
    """Return log w of each token: trainer minus engine. [M], without gradient."""
    trainer = tokens.logprobs.detach() if config.use_rollout_logprobs else tokens.old_logprobs
    return trainer - tokens.rollout_logprobs


def fraction_outside(tokens: LossTokens, ratio: Tensor, config: LossConfig) -> Tensor:
    """Return the share of tokens whose ratio [M] is outside of [mismatch_low, mismatch_high]. []"""
    low, high = config.mismatch_bounds
    return (tokens.shares * ((ratio < low) | (ratio > high))).sum()


def finish_metrics(metrics: Mapping[str, float], *, num_tokens: int) -> Metrics:
    """Return the metrics to log, from metrics reduced over packs and ranks.

    Means and sums need no change. A value that is not linear in its tokens is reduced as sums whose last name component
    starts with `_`. This function replaces them: ess = (sum w)^2 / (n sum w^2), in (0, 1], 1 if engine and trainer
    agree. If the packs of the step had no loss token (`num_tokens`), the terms of the loss are 0 and no mean exists.
    """
    if not num_tokens:
        return {name: value for name, value in metrics.items() if name.startswith("loss/")}
    finished = {name: value for name, value in metrics.items() if not name.rpartition("/")[2].startswith("_")}
    if "mismatch/_w_mean" in metrics:
        finished["mismatch/ess"] = metrics["mismatch/_w_mean"] ** 2 / metrics["mismatch/_w2_mean"]
    return finished
