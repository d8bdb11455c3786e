"""The loss that clips the ratio of new to old policy: grpo."""

import torch
from torch import Tensor

from fsdptrain.algo.objective import policy_loss
from fsdptrain.algo.tokens import LossTokens, at_loss_tokens
from fsdptrain.types import LogProbs, LossConfig, LossOutput, PackedBatch


def grpo(batch: PackedBatch, logprobs: LogProbs, config: LossConfig) -> LossOutput:
    """Clipped policy gradient, with dual clip if `eps_clip_c` is set (arXiv 2402.03300; 1912.09729 section 3.2).

    -min(r A, clip(r, 1 - eps_clip, 1 + eps_clip_high) A), r = exp(l - lo); bounded by -eps_clip_c A where A < 0.
    Strictly on-policy (`old_logprobs` None), r is 1 and has the gradient of l.
    """
    tokens = at_loss_tokens(batch, logprobs)
    return clipped_ratio(tokens, tokens.log_ratio, config)


def clipped_ratio(tokens: LossTokens, log_ratio: Tensor, config: LossConfig) -> LossOutput:
    """Compute PPO's pessimistic bound, with optional dual clip, for token or sequence ratios."""
    ratio = log_ratio.exp()
    low, high = 1 - config.eps_clip, 1 + config.clip_high
    policy = -torch.minimum(ratio * tokens.advantages, ratio.clamp(low, high) * tokens.advantages)
    if config.eps_clip_c is not None:
        bound = torch.where(tokens.advantages < 0, -config.eps_clip_c * tokens.advantages, torch.inf)
        policy = torch.minimum(policy, bound)
    return policy_loss(
        tokens,
        policy,
        config,
        ratio=ratio,
        clipped_low=(ratio < low) & (tokens.advantages < 0),
        clipped_high=(ratio > high) & (tokens.advantages > 0),
    )
