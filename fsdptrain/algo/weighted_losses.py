"""Losses that weight or mask the policy gradient of each token: cispo, sapo, prime_rl, reinforce, sft."""

import torch

from fsdptrain.algo.metrics import mismatch_metrics, policy_metrics
from fsdptrain.algo.objective import policy_loss, total
from fsdptrain.algo.tokens import at_loss_tokens, clamped
from fsdptrain.types import LogProbs, LossConfig, LossOutput, PackedBatch

PRIME_RL_KL_COEF = 1e-3  # of the squared log ratio of policy to engine, as in prime-rl


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
    the gradient equals the gradient of -A l for any tau.
    """
    tokens = at_loss_tokens(batch, logprobs)
    ratio = tokens.log_ratio.exp()
    tau = torch.full_like(ratio, config.sapo_tau_neg).masked_fill(tokens.advantages > 0, config.sapo_tau_pos)
    policy = -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * tokens.advantages
    none = torch.zeros_like(tokens.mask)
    return policy_loss(tokens, policy, config, ratio=ratio, clipped_low=none, clipped_high=none)


def prime_rl(batch: PackedBatch, logprobs: LogProbs, config: LossConfig) -> LossOutput:
    """Policy gradient with ratios to the engine's logprobs, without old logprobs (default loss of prime-rl).

    -rho A for kept tokens, rho = exp(l - lr) with its gradient, plus 0.001 (l - lr)^2 on every token. A
    token is kept if p - pr <= eps_clip_high where A > 0, and if p - pr >= -eps_clip elsewhere. The mask is
    from arXiv 2602.04879, the penalty from arXiv 2602.02276.
    """
    tokens = at_loss_tokens(batch, logprobs)
    log_ratio = clamped(tokens.logprobs - tokens.rollout_logprobs)
    moved = tokens.logprobs.detach().exp() - tokens.rollout_logprobs.exp()
    too_high, too_low = moved > config.clip_high, moved < -config.eps_clip
    dropped = torch.where(tokens.advantages > 0, too_high, too_low)
    ratio = log_ratio.exp()
    policy = torch.where(dropped, 0.0, -ratio * tokens.advantages) + PRIME_RL_KL_COEF * log_ratio.square()
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
