"""Losses that weight or mask the policy gradient of each token: cispo, sapo, dppo, prime_rl, reinforce, sft."""

import torch
from torch import Tensor

from fsdptrain.algo.metrics import mismatch_metrics, policy_metrics
from fsdptrain.algo.objective import policy_loss, total
from fsdptrain.algo.tokens import LossTokens, at_loss_tokens, clamped
from fsdptrain.types import LogProbs, LossConfig, LossOutput, PackedBatch

TINY = 1e-8  # lower bound of 1 - p; keeps its logarithm finite


def reinforce(batch: PackedBatch, logprobs: LogProbs, config: LossConfig) -> LossOutput:
    """Plain policy gradient, -A l, without ratio and clip (Williams 1992, Machine Learning 8)."""
    tokens = at_loss_tokens(batch, logprobs)
    none = torch.zeros_like(tokens.mask)
    policy = -tokens.advantages * tokens.logprobs
    return policy_loss(tokens, policy, config, ratio=tokens.log_ratio.exp(), clipped_low=none, clipped_high=none)


def cispo(batch: PackedBatch, logprobs: LogProbs, config: LossConfig) -> LossOutput:
    """Capped importance weights; every token keeps its gradient (CISPO, arXiv 2506.13585).

    -sg(min(r, is_cap_high)) A l, r = exp(l - lo). The cap is absolute, not 1 + eps.
    """
    tokens = at_loss_tokens(batch, logprobs)
    ratio = tokens.log_ratio.detach().exp()
    return policy_loss(
        tokens,
        -ratio.clamp(max=config.is_cap_high) * tokens.advantages * tokens.logprobs,
        config,
        ratio=ratio,
        clipped_low=torch.zeros_like(tokens.mask),
        clipped_high=ratio > config.is_cap_high,
    )


def sapo(batch: PackedBatch, logprobs: LogProbs, config: LossConfig) -> LossOutput:
    """Soft gate instead of the clip (SAPO, arXiv 2511.20347).

    -(4 / tau) sigmoid(tau (r - 1)) A, r = exp(l - lo), tau = sapo_tau_pos where A > 0, else sapo_tau_neg. On-policy,
    the gradient is that of -A l for any tau.
    """
    tokens = at_loss_tokens(batch, logprobs)
    ratio = tokens.log_ratio.exp()
    tau = torch.full_like(ratio, config.sapo_tau_neg).masked_fill(tokens.advantages > 0, config.sapo_tau_pos)
    policy = -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * tokens.advantages
    none = torch.zeros_like(tokens.mask)
    return policy_loss(tokens, policy, config, ratio=ratio, clipped_low=none, clipped_high=none)


def dppo_tv(batch: PackedBatch, logprobs: LogProbs, config: LossConfig) -> LossOutput:
    """Trust region in probability; drops tokens outside of it (DPPO, arXiv 2602.04879, total variation).

    -sg(min(r, is_cap_high)) A l for kept tokens. With p = exp(l), a token is kept if p - po <= eps_clip_high where A >
    0, and if p - po >= -eps_clip elsewhere.
    """
    tokens = at_loss_tokens(batch, logprobs)
    moved = tokens.logprobs.detach().exp() - tokens.old_logprobs.exp()
    return _masked_gradient(tokens, config, too_high=moved > config.eps_clip_high, too_low=moved < -config.eps_clip)


def dppo_kl(batch: PackedBatch, logprobs: LogProbs, config: LossConfig) -> LossOutput:
    """dppo_tv with the binary KL divergence ("this token or another") as distance (DPPO, arXiv 2602.04879).

    D = po (lo - l) + (1 - po) log((1 - po) / (1 - p)). Drops tokens with p > po and D > eps_clip_high where A > 0, and
    tokens with p < po and D > eps_clip elsewhere.
    """
    tokens = at_loss_tokens(batch, logprobs)
    log_ratio = tokens.logprobs.detach() - tokens.old_logprobs
    old = tokens.old_logprobs.exp()
    rest, old_rest = _rest(tokens.logprobs.detach()), _rest(tokens.old_logprobs)
    distance = -old * log_ratio + old_rest * (old_rest / rest).log()
    return _masked_gradient(
        tokens,
        config,
        too_high=(log_ratio > 0) & (distance > config.eps_clip_high),
        too_low=(log_ratio < 0) & (distance > config.eps_clip),
    )


def prime_rl(batch: PackedBatch, logprobs: LogProbs, config: LossConfig) -> LossOutput:
    """Policy gradient with ratios to the engine's logprobs, without old logprobs (default loss of prime-rl).

    -rho A for kept tokens, rho = exp(l - lr) with its gradient, plus prime_rl_kl_coef (l - lr)^2 on every token. A
    token is kept if p - pr <= eps_clip_high where A > 0, and if p - pr >= -eps_clip elsewhere. The mask is that of
    arXiv 2602.04879, the penalty that of arXiv 2602.02276.
    """
    tokens = at_loss_tokens(batch, logprobs)
    log_ratio = clamped(tokens.logprobs - tokens.rollout_logprobs)
    moved = tokens.logprobs.detach().exp() - tokens.rollout_logprobs.exp()
    too_high, too_low = moved > config.eps_clip_high, moved < -config.eps_clip
    dropped = torch.where(tokens.advantages > 0, too_high, too_low)
    ratio = log_ratio.exp()
    policy = torch.where(dropped, 0.0, -ratio * tokens.advantages) + config.prime_rl_kl_coef * log_ratio.square()
    metrics = policy_metrics(
        tokens,
        ratio=ratio.detach(),
        log_ratio=log_ratio.detach(),
        clipped_low=too_low & (tokens.advantages < 0),
        clipped_high=too_high & (tokens.advantages > 0),
    )
    return total(tokens, policy, config, metrics | mismatch_metrics(tokens, config))


def sft(batch: PackedBatch, logprobs: LogProbs, config: LossConfig) -> LossOutput:
    """Negative log-likelihood of the loss tokens, -l. Ignores advantages and rollout logprobs."""
    tokens = at_loss_tokens(batch, logprobs)
    return total(tokens, -tokens.logprobs, config, {})


def _masked_gradient(tokens: LossTokens, config: LossConfig, *, too_high: Tensor, too_low: Tensor) -> LossOutput:
    dropped = torch.where(tokens.advantages > 0, too_high, too_low)
    ratio = tokens.log_ratio.detach().exp()
    policy = -ratio.clamp(max=config.is_cap_high) * tokens.advantages * tokens.logprobs
    return policy_loss(
        tokens,
        torch.where(dropped, 0.0, policy),
        config,
        ratio=ratio,
        clipped_low=too_low & (tokens.advantages < 0),
        clipped_high=too_high & (tokens.advantages > 0),
    )


def _rest(logprobs: Tensor) -> Tensor:
    """1 - p, without cancellation for small p, clamped to at least TINY."""
    return (-torch.expm1(logprobs)).clamp(min=TINY)
