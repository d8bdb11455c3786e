"""Combination of per-token policy losses into one number: corrections, KL and entropy terms, weighted sum.

Losses are sums over the loss tokens of a pack, weighted by `loss_weights`, which include the global denominator. Do not
divide them afterwards.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fsdptrain.algo.kl import KL_ESTIMATORS
from fsdptrain.algo.metrics import mismatch_metrics, policy_metrics
from fsdptrain.algo.tokens import LossTokens
from fsdptrain.types import LossConfig, LossOutput


def policy_loss(
    tokens: LossTokens, policy: Tensor, config: LossConfig, *, ratio: Tensor, clipped_low: Tensor, clipped_high: Tensor
) -> LossOutput:
    """Complete a loss that uses the old policy: apply corrections and masks to `policy` [M], then call `total`.

    Args:
        policy: loss of each token, before aggregation.
        ratio: ratio of new to old policy in the loss, for metrics.
        clipped_low, clipped_high: tokens whose gradient the clip removes, for metrics.
    """
    metrics = policy_metrics(
        tokens,
        ratio=ratio.detach(),
        log_ratio=tokens.log_ratio.detach(),
        clipped_low=clipped_low,
        clipped_high=clipped_high,
    )
    metrics |= mismatch_metrics(tokens, config)
    if config.mismatch_correction != "none":
        from fsdptrain.algo.corrections import corrected

        policy, of_correction = corrected(tokens, policy, config)
        metrics |= of_correction
    if config.use_opsm:
        from fsdptrain.algo.sequences import off_policy_sequences

        dropped = off_policy_sequences(tokens, config.opsm_delta)
        policy = torch.where(dropped, 0.0, policy)
        metrics["policy/opsm_fraction"] = (tokens.shares * dropped).sum()
    return total(tokens, policy, config, metrics)


def total(tokens: LossTokens, policy: Tensor, config: LossConfig, metrics: Mapping[str, Tensor]) -> LossOutput:
    """policy + kl_loss_coef * KL - entropy_coef * H. loss/policy, loss/kl and loss/entropy add up to loss/total."""
    terms = {"loss/policy": (tokens.weights * policy).sum()}
    extra: dict[str, Tensor] = {}
    if tokens.ref_logprobs is not None:
        kl = KL_ESTIMATORS[config.kl_loss_type](tokens.logprobs - tokens.ref_logprobs)
        if config.use_unbiased_kl:
            kl = tokens.log_ratio.exp() * kl
        terms["loss/kl"] = config.kl_loss_coef * (tokens.weights * kl).sum()
        extra["policy/ref_kl"] = (tokens.shares * kl).sum()
    if tokens.entropy is not None:
        terms["loss/entropy"] = -config.entropy_coef * (tokens.weights * tokens.entropy).sum()
        extra["policy/entropy"] = (tokens.shares * tokens.entropy).sum()
    loss = torch.stack(list(terms.values())).sum()
    logged = {"loss/total": loss, **terms, **extra, **metrics}
    return LossOutput(loss, {name: value.detach() for name, value in logged.items()})
