"""Which tokens truncated sampling leaves, and nothing else: engine and trainer ask the same function.

Temperature comes first, then min_p and top_k, then top_p within what these left: vLLM's order (Sampler.sample, docs of
version 0.19). What is left is always a head of the distribution, all tokens from some logit upwards, so one number for
each row says all of it. Tokens with exactly that logit stay, all of them: the set depends on no order among ties.
"""

import math
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdptrain.config import RolloutConfig

_BLOCK = 128  # entries whose running sum is one row of a matrix product
_MAX_ELEMENTS = 2**23  # logits that are sorted at one time: 64 MiB for each float64 copy of them


@dataclass(frozen=True)
class Truncation:
    """What sampling leaves of the vocabulary; as it is made, all of it."""

    top_p: float = 1.0
    top_k: int = -1  # -1: off
    min_p: float = 0.0

    @classmethod
    def of(cls, rollout: RolloutConfig) -> Self:
        """What the engine samples from in training."""
        return cls(rollout.top_p, rollout.top_k or -1, rollout.min_p)

    def __bool__(self) -> bool:
        return self != UNTRUNCATED


UNTRUNCATED = Truncation()


def smallest_kept(logits: Tensor, truncation: Truncation) -> Tensor:
    """The smallest logit that stays, of each row of `logits` [R, V], after temperature: [R]. Without gradient.

    min_p keeps what is at least min_p times as likely as the most likely token (arXiv 2407.01082); top_k the k most
    likely; top_p the fewest of the most likely whose probability reaches top_p (arXiv 1904.09751). One token at least.
    """
    logits = logits.detach()
    smallest = torch.full_like(logits[:, 0], -torch.inf)
    if truncation.min_p > 0.0:
        smallest = logits.amax(-1) + math.log(truncation.min_p)
    if truncation.top_k > 0:
        kth = logits.topk(min(truncation.top_k, logits.shape[-1]), dim=-1).values[:, -1]
        smallest = torch.maximum(smallest, kth)
    if truncation.top_p < 1.0:
        rows = max(1, _MAX_ELEMENTS // logits.shape[-1])
        parts = zip(logits.split(rows), smallest.split(rows), strict=True)
        smallest = torch.cat([_nucleus(part, floor, truncation.top_p) for part, floor in parts])
    return smallest


def _nucleus(logits: Tensor, smallest: Tensor, top_p: float) -> Tensor:
    """The last token whose mass of likelier ones, among those from `smallest` [R] upwards, is below top_p: [R]"""
    ordered = logits.sort(dim=-1, descending=True).values
    left = ordered.masked_fill(ordered < smallest[:, None], -torch.inf)
    probs = left.softmax(-1, dtype=torch.float64)
    mass_before = running_sums(probs) - probs
    last = (mass_before < top_p).sum(-1, keepdim=True).clamp(min=1) - 1
    return torch.maximum(ordered.gather(-1, last)[:, 0], smallest)


def running_sums(values: Tensor) -> Tensor:
    """Inclusive sums along the last dimension of `values` [R, N] f64.

    A product with a triangle of ones, in blocks: torch.cumsum has no deterministic kernel for floats on CUDA, and
    raises under --deterministic-mode.
    """
    num_rows, length = values.shape
    size = min(length, _BLOCK)
    triangle = values.new_ones(size, size).triu()
    if length <= _BLOCK:
        return values @ triangle
    blocks = F.pad(values, (0, -length % _BLOCK)).view(num_rows, -1, _BLOCK) @ triangle
    ends = running_sums(blocks[:, :, -1])
    blocks[:, 1:] += ends[:, :-1, None]
    return blocks.view(num_rows, -1)[:, :length]
