"""Sample a token from logits: inverse transform sampling with one uniform number per token.

The number depends only on (seed, prompt id, sample index, position), so that a completion does not depend on the rank,
the batch or the order, except through rounding of the logits. Gumbel noise would need a number per vocabulary entry.
"""

import hashlib
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fsdptrain.config import Config
from fsdptrain.model.running_sums import running_sums
from fsdptrain.types import UNTRUNCATED, SamplingParams, Truncation

_BLOCK = 128  # vocabulary entries per block of the two-level search
_MAX_ELEMENTS = 2**25  # logits per chunk: a float32 copy takes 128 MiB


def uniform_stream(seed: int, prompt_id: str, sample_index: int, count: int) -> np.ndarray:
    """Return the first `count` uniform numbers in [0, 1) of one completion. (count,) f64

    Philox, a counter-based generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), keyed by a
    hash of seed, prompt and sample. The numbers do not depend on the machine or on `count`.
    """
    name = f"{seed}/{sample_index}/{prompt_id}"
    key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(key=key)).random(count)


def sampling_params(config: Config, **changes: Any) -> SamplingParams:
    """Return the sampling parameters of rollouts, updated with `changes`."""
    rollout = config.rollout
    values: dict[str, Any] = {
        "num_samples": config.algorithm.n_samples_per_prompt,
        "max_tokens": rollout.max_response_len,
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k or -1,
        "min_p": rollout.min_p,
        "stop_token_ids": tuple(rollout.stop_token_ids),
        "stop": tuple(rollout.stop),
        "seed": rollout.seed,
    }
    return SamplingParams(**values | changes)


def sample(
    logits: Tensor, uniforms: Tensor, *, temperature: float, truncation: Truncation = UNTRUNCATED
) -> tuple[Tensor, Tensor]:
    """Sample a token from each row of `logits` [R, V]. Returns tokens [R] i64 and their logprobs [R] f32.

    The logprob is that of the sampled distribution: after temperature, renormalized over the tokens that `truncation`
    keeps. At temperature 0 the token is the most likely one, with its logprob at temperature 1. `uniforms` [R] f64 in
    [0, 1).
    """
    rows = max(1, _MAX_ELEMENTS // logits.shape[-1])
    parts = [
        _sample_rows(part, draws, temperature, truncation)
        for part, draws in zip(logits.split(rows), uniforms.split(rows), strict=True)
    ]
    tokens, logprobs = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def _sample_rows(logits: Tensor, uniforms: Tensor, temperature: float, truncation: Truncation) -> tuple[Tensor, Tensor]:
    scaled = logits.float()
    if temperature > 0.0:
        scaled = restrict(scaled / temperature if temperature != 1.0 else scaled, truncation)
    shifted = scaled - scaled.amax(-1, keepdim=True)
    weights = shifted.exp()  # unnormalized: the draw needs no denominator
    tokens = inverse_cdf(weights, uniforms) if temperature > 0.0 else shifted.argmax(-1)
    return tokens, shifted.gather(-1, tokens[:, None]).squeeze(-1) - weights.sum(-1).log()


def restrict(logits: Tensor, truncation: Truncation) -> Tensor:
    """Set `logits` [R, V], after temperature, to -inf for tokens that `truncation` excludes."""
    if not truncation:
        return logits
    from fsdptrain.model.truncation import smallest_kept

    return logits.masked_fill(logits < smallest_kept(logits, truncation)[:, None], -torch.inf)


def inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw tokens with probabilities proportional to `weights` [R, V] f32, from `uniforms` [R] f64. Returns [R] i64.

    Searches first for the block, then for the entry in it. Cumulative sums are float64; the sum of one block is
    float32, like `weights` (float64 is ten times slower on a CPU). A token of weight 0 is never drawn.
    """
    num_rows, vocab_size = weights.shape
    blocks = F.pad(weights, (0, -vocab_size % _BLOCK)).view(num_rows, -1, _BLOCK)
    row = torch.arange(num_rows, device=weights.device)

    ends = running_sums(blocks.sum(-1).double())  # [R, V / _BLOCK]
    target = _below(uniforms * ends[:, -1], ends[:, -1])
    block = (ends <= target[:, None]).sum(-1)
    start = torch.where(block > 0, ends[row, block - 1], 0.0)

    ends = running_sums(blocks[row, block].double())  # [R, _BLOCK]
    target = _below((target - start).clamp(min=0.0), ends[:, -1])
    return block * _BLOCK + (ends <= target[:, None]).sum(-1)


def _below(target: Tensor, limit: Tensor) -> Tensor:
    """Return `target`, lowered below `limit` if rounding reached it."""
    return torch.minimum(target, torch.nextafter(limit, torch.zeros_like(limit)))
