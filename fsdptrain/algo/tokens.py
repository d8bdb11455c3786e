"""A pack at its loss tokens, and sums over the sequences in it.

Everything of a loss is computed at `loss_positions` only ([M]), so what stands elsewhere in a pack can never reach a
gradient. A sequence is never split over packs, so a quantity of a whole sequence is a segment reduction over
`cu_seqlens`, on the device, without waiting for it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fsdptrain.types import LogProbs, PackedBatch

MAX_LOG_RATIO = 20.0  # exp(20) = 5e8: far outside of every clip, still finite when squared


@dataclass(frozen=True)
class LossTokens:
    """What a loss sees: the M loss tokens of a pack. Advantages and weights are the same for all of a sequence's."""

    logprobs: Tensor  # [M] f32 with gradient
    entropy: Tensor | None  # [M] f32
    old_logprobs: Tensor  # [M] f32
    ref_logprobs: Tensor | None  # [M] f32
    rollout_logprobs: Tensor  # [M] f32
    advantages: Tensor  # [M] f32
    weights: Tensor  # [M] f32, for the loss
    shares: Tensor  # [M] f32, for metrics: 1 / loss tokens of the optimizer step
    mask: Tensor  # [M] bool, False only in a pack without loss tokens, where M is 1
    segments: Tensor  # [M] i64, the sequence of each token
    num_segments: int

    @property
    def log_ratio(self) -> Tensor:
        """l - lo, clamped to +-20; 0 with the gradient of l where the step is strictly on-policy. [M]"""
        return clamped(self.logprobs - self.old_logprobs)


def at_loss_tokens(batch: PackedBatch, logprobs: LogProbs) -> LossTokens:
    """`batch` and what the model says of it, at the loss tokens. Without old logprobs the current ones are the old."""
    at = batch.loss_positions
    current = logprobs.values[at]
    # In a pack without loss tokens `at` is [0], where the mask is False: then weight and share are 0.
    mask = batch.loss_mask[at]
    return LossTokens(
        logprobs=current,
        entropy=None if logprobs.entropy is None else logprobs.entropy[at],
        old_logprobs=current.detach() if batch.old_logprobs is None else batch.old_logprobs[at],
        ref_logprobs=None if batch.ref_logprobs is None else batch.ref_logprobs[at],
        rollout_logprobs=batch.rollout_logprobs[at],
        advantages=batch.advantages[at],
        weights=batch.loss_weights[at],
        shares=mask.to(current.dtype) / max(1, batch.num_loss_tokens),
        mask=mask,
        segments=torch.searchsorted(batch.cu_seqlens[1:].to(at.dtype), at, right=True),
        num_segments=len(batch.seqlens),
    )


def clamped(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_sum(tokens: LossTokens, values: Tensor) -> Tensor:
    """At each token the sum of `values` over the loss tokens of its sequence. [M] -> [M]"""
    counted = torch.where(tokens.mask, values, 0.0)
    sums = counted.new_zeros(tokens.num_segments).index_add(0, tokens.segments, counted)
    return sums[tokens.segments]


def sequence_mean(tokens: LossTokens, values: Tensor) -> Tensor:
    """At each token the mean of `values` over the loss tokens of its sequence. [M] -> [M]"""
    counts = sequence_sum(tokens, torch.ones_like(values))
    return sequence_sum(tokens, values) / counts.clamp(min=1)  # 0 loss tokens: an empty pack


def sequence_max(tokens: LossTokens, values: Tensor) -> Tensor:
    """At each token the largest of `values`, at least 0, over the loss tokens of its sequence. [M] -> [M]"""
    counted = torch.where(tokens.mask, values, 0.0)
    largest = counted.new_zeros(tokens.num_segments).scatter_reduce(0, tokens.segments, counted, "amax")
    return largest[tokens.segments]


def straight_through(values: Tensor, target: Tensor) -> Tensor:
    """`target`, with the gradient of `values`: what GSPO calls the token form of a sequence's quantity. [M]

    If f(target) is summed over a sequence with one weight, and target is the mean of `values`, then the gradient is the
    one that the mean itself would give.
    """
    return values - values.detach() + target.detach()
