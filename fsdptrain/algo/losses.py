"""Policy losses: sums over the loss tokens of a pack, weighted by `loss_weights`, which hold the global denominator.

Everything is computed at `loss_positions` only ([M]), so what stands elsewhere in a pack can never reach a gradient.
Metrics are divided by the loss tokens of the whole optimizer step: summed over packs and ranks they are means. Which
names are emitted depends on the configuration alone, so that every pack of every rank emits the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdptrain.algo.kl import KL_ESTIMATORS, k3
from fsdptrain.protocols import Loss
from fsdptrain.types import LogProbs, LossConfig, LossOutput, Metrics, PackedBatch

MAX_LOG_RATIO = 20.0  # exp(20) = 5e8: far outside of every clip, still finite when squared
MISMATCH_BOUNDS = (0.5, 2.0)  # exp(trainer - rollout) outside of it counts as out of bounds


@dataclass(frozen=True)
class LossTokens:
    """A pack at its loss tokens."""

    logprobs: Tensor  # [M] f32 with gradient
    entropy: Tensor | None  # [M] f32
    old_logprobs: Tensor  # [M] f32
    ref_logprobs: Tensor | None  # [M] f32
    rollout_logprobs: Tensor  # [M] f32
    advantages: Tensor  # [M] f32
    weights: Tensor  # [M] f32, for the loss
    shares: Tensor  # [M] f32, for metrics: 1 / loss tokens of the optimizer step


def grpo(batch: PackedBatch, logprobs: LogProbs, config: LossConfig) -> LossOutput:
    """Clipped policy gradient, with dual clip where `eps_clip_c` is set (arXiv 2402.03300; 1912.09729 section 3.2).

    -min(r A, clip(r, 1 - eps_clip, 1 + eps_clip_high) A), r = exp(l - lo); where A < 0 at most -eps_clip_c A. Strictly
    on-policy (`old_logprobs` None) r is 1 and its gradient is that of l.
    """
    tokens = _loss_tokens(batch, logprobs)
    log_ratio = _clamped(tokens.logprobs - tokens.old_logprobs)
    ratio = log_ratio.exp()
    low, high = 1 - config.eps_clip, 1 + config.eps_clip_high
    policy = -torch.minimum(ratio * tokens.advantages, ratio.clamp(low, high) * tokens.advantages)
    if config.eps_clip_c is not None:
        bound = torch.where(tokens.advantages < 0, -config.eps_clip_c * tokens.advantages, torch.inf)
        policy = torch.minimum(policy, bound)
    metrics = {
        **_policy_metrics(tokens, log_ratio.detach(), low=low, high=high),
        **_mismatch_metrics(tokens),
    }
    return _total(tokens, policy, config, metrics)


def sft(batch: PackedBatch, logprobs: LogProbs, config: LossConfig) -> LossOutput:
    """Negative log-likelihood of the loss tokens; advantages and rollout logprobs are not looked at."""
    tokens = _loss_tokens(batch, logprobs)
    return _total(tokens, -tokens.logprobs, config, {})


LOSSES: Mapping[str, Loss] = {"grpo": grpo, "sft": sft}


def finish_metrics(metrics: Mapping[str, float]) -> Metrics:
    """What to log, from metrics that were reduced over packs and ranks.

    A mean or a sum needs nothing; a value that is not linear in its tokens travels as the sums that it is made of,
    whose last part begins with `_`. They are taken out here: ess = (sum w)^2 / (n sum w^2), in (0, 1], 1 where engine
    and trainer agree.
    """
    finished = {name: value for name, value in metrics.items() if not name.rpartition("/")[2].startswith("_")}
    if "mismatch/_w_mean" in metrics:
        square_mean = metrics["mismatch/_w2_mean"]  # 0 where the step had no loss token
        finished["mismatch/ess"] = metrics["mismatch/_w_mean"] ** 2 / square_mean if square_mean > 0 else 1.0
    return finished


def _loss_tokens(batch: PackedBatch, logprobs: LogProbs) -> LossTokens:
    at = batch.loss_positions
    current = logprobs.values[at]
    # In an empty pack `at` is [0], where the mask is False: then weight and share are 0.
    shares = batch.loss_mask[at].to(current.dtype) / max(1, batch.num_loss_tokens)
    return LossTokens(
        logprobs=current,
        entropy=None if logprobs.entropy is None else logprobs.entropy[at],
        old_logprobs=current.detach() if batch.old_logprobs is None else batch.old_logprobs[at],
        ref_logprobs=None if batch.ref_logprobs is None else batch.ref_logprobs[at],
        rollout_logprobs=batch.rollout_logprobs[at],
        advantages=batch.advantages[at],
        weights=batch.loss_weights[at],
        shares=shares,
    )


def _total(tokens: LossTokens, policy: Tensor, config: LossConfig, metrics: Mapping[str, Tensor]) -> LossOutput:
    """policy + kl_loss_coef * KL - entropy_coef * H; loss/policy, loss/kl and loss/entropy add up to loss/total."""
    terms = {"loss/policy": (tokens.weights * policy).sum()}
    extra: dict[str, Tensor] = {}
    if tokens.ref_logprobs is not None:
        kl = KL_ESTIMATORS[config.kl_loss_type](tokens.logprobs - tokens.ref_logprobs)
        terms["loss/kl"] = config.kl_loss_coef * (tokens.weights * kl).sum()
        extra["policy/ref_kl"] = (tokens.shares * kl).sum()
    if tokens.entropy is not None:
        terms["loss/entropy"] = -config.entropy_coef * (tokens.weights * tokens.entropy).sum()
        extra["policy/entropy"] = (tokens.shares * tokens.entropy).sum()
    loss = torch.stack(list(terms.values())).sum()
    logged = {"loss/total": loss, **terms, **extra, **metrics}
    return LossOutput(loss, {name: value.detach() for name, value in logged.items()})


def _policy_metrics(tokens: LossTokens, log_ratio: Tensor, *, low: float, high: float) -> dict[str, Tensor]:
    """Clipped is a token whose gradient the clip takes away: one on the side that its advantage pushes to."""
    ratio = log_ratio.exp()
    clipped_low = (ratio < low) & (tokens.advantages < 0)
    clipped_high = (ratio > high) & (tokens.advantages > 0)
    return {
        "policy/ratio_mean": (tokens.shares * ratio).sum(),
        "policy/clip_fraction_low": (tokens.shares * clipped_low).sum(),
        "policy/clip_fraction_high": (tokens.shares * clipped_high).sum(),
        "policy/approx_kl": (tokens.shares * k3(-log_ratio)).sum(),  # KL(old || current): old made the tokens
    }


def _mismatch_metrics(tokens: LossTokens) -> dict[str, Tensor]:
    """Trainer against engine on the same weights, w = exp(lo - lr); with `use_rollout_logprobs` lo is lr."""
    log_w = _clamped(tokens.old_logprobs - tokens.rollout_logprobs)
    w = log_w.exp()
    low, high = MISMATCH_BOUNDS
    distance = (tokens.old_logprobs - tokens.rollout_logprobs).abs()
    return {
        "mismatch/abs_mean": (tokens.shares * distance).sum(),
        "mismatch/abs_max": torch.where(tokens.shares > 0, distance, 0.0).max(),
        "mismatch/k3": (tokens.shares * k3(-log_w)).sum(),  # KL(rollout || trainer): the engine made the tokens
        "mismatch/out_of_bounds": (tokens.shares * ((w < low) | (w > high))).sum(),
        "mismatch/_w_mean": (tokens.shares * w).sum(),
        "mismatch/_w2_mean": (tokens.shares * w.square()).sum(),
    }


def _clamped(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
