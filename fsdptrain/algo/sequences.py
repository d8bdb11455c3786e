"""Quantities of whole sequences: sums and means over their loss tokens, the loss gspo, and off-policy masking.

A sequence is never split over packs, so they are segment reductions, on the device and without synchronization.
"""

import torch
from torch import Tensor

from fsdptrain.algo.clipped_losses import clipped_ratio
from fsdptrain.algo.tokens import LossTokens, at_loss_tokens, clamped
from fsdptrain.types import LogProbs, LossConfig, LossOutput, PackedBatch


def gspo(batch: PackedBatch, logprobs: LogProbs, config: LossConfig) -> LossOutput:
    """One ratio per sequence, clipped as in grpo (GSPO, arXiv 2507.18071).

    s_i = exp(mean_t(l - lo)); r = s_i with the gradient of l (token form of the paper), then as grpo. With equal token
    weights, the gradient equals the gradient of the sequence form.
    """
    tokens = at_loss_tokens(batch, logprobs)
    mean = sequence_mean(tokens, (tokens.logprobs - tokens.old_logprobs).detach())
    straight_through = tokens.logprobs - tokens.logprobs.detach() + mean  # the mean, with the gradient of l
    return clipped_ratio(tokens, clamped(straight_through), config)


def off_policy_sequences(tokens: LossTokens, delta: float) -> Tensor:  # [M] bool
    """OPSM: drop sequences with A < 0 and mean_t(lo - l) > delta (DeepSeek-V3.2, arXiv 2512.02556)."""
    drift = sequence_mean(tokens, tokens.old_logprobs - tokens.logprobs.detach())
    return (tokens.advantages < 0) & (drift > delta)


def sequence_sum(tokens: LossTokens, values: Tensor) -> Tensor:
    """Sum `values` over the loss tokens of each sequence, broadcast to its tokens. [M] -> [M]"""
    counted = torch.where(tokens.mask, values, 0.0)
    sums = counted.new_zeros(tokens.num_segments).index_add(0, tokens.segments, counted)
    return sums[tokens.segments]


def sequence_mean(tokens: LossTokens, values: Tensor) -> Tensor:
    """Average `values` over the loss tokens of each sequence, broadcast to its tokens. [M] -> [M]"""
    counts = sequence_sum(tokens, torch.ones_like(values))
    return sequence_sum(tokens, values) / counts.clamp(min=1)  # 0 loss tokens in an empty pack
