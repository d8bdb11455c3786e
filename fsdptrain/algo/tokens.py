"""Loss tokens of a pack: losses are computed at `loss_positions` only ([M]), so no other value affects the gradient."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fsdptrain.types import LogProbs, PackedBatch

MAX_LOG_RATIO = 20.0  # exp(20) = 5e8: far outside any clip, finite when squared


@dataclass(frozen=True)
class LossTokens:
    """Inputs of a loss at the M loss tokens of a pack. Advantages and weights are constant within a sequence."""

    logprobs: Tensor  # [M] f32 with gradient
    entropy: Tensor | None  # [M] f32
    old_logprobs: Tensor  # [M] f32
    ref_logprobs: Tensor | None  # [M] f32
    rollout_logprobs: Tensor  # [M] f32
    advantages: Tensor  # [M] f32
    weights: Tensor  # [M] f32, weights in the loss
    shares: Tensor  # [M] f32, weights in metrics: 1 / loss tokens in the packs of the optimizer step
    mask: Tensor  # [M] bool; False only in a pack without loss tokens, where M is 1
    segments: Tensor  # [M] i64, sequence index of each token
    num_segments: int

    @property
    def log_ratio(self) -> Tensor:
        """l - lo, clamped to +-20; strictly on-policy 0, with the gradient of l. [M]"""
        return clamped(self.logprobs - self.old_logprobs)


def at_loss_tokens(batch: PackedBatch, logprobs: LogProbs) -> LossTokens:
    """Select the loss tokens of `batch` and `logprobs`. Without old logprobs, the current ones are used, detached."""
    at = batch.loss_positions
    current = logprobs.values[at]
    # In a pack without loss tokens, `at` is [0] and the mask is False there, so weight and share are 0.
    mask = batch.loss_mask[at]
    return LossTokens(
        logprobs=current,
        entropy=None if logprobs.entropy is None else logprobs.entropy[at],
        old_logprobs=current.detach() if batch.old_logprobs is None else batch.old_logprobs[at],
        ref_logprobs=None if batch.ref_logprobs is None else batch.ref_logprobs[at],
        rollout_logprobs=batch.rollout_logprobs[at],
        advantages=batch.advantages[at],
        weights=batch.loss_weights[at],
        shares=mask.to(current.dtype) / max(1, batch.num_trained_tokens),
        mask=mask,
        segments=torch.searchsorted(batch.cu_seqlens[1:].to(at.dtype), at, right=True),
        num_segments=len(batch.seqlens),
    )


def clamped(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
