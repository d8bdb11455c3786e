"""Attention that the fused causal kernel does not support: windows, softcap, sinks, keys before the first query.

It runs over blocks of queries and the keys that they can see.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fsdptrain.model.attention.attention import AttentionOptions, fused_attention, widen

BLOCK = 512  # queries per block where scores are materialized


def attention_in_blocks(
    q: Tensor,  # [B, H, Q, D], the last Q tokens
    k: Tensor,  # [B, HK, L, D]
    v: Tensor,  # [B, HK, L, DV]
    options: AttentionOptions,
    window: int | None,
) -> Tensor:  # [B, H, Q, DV]
    """Compute causal attention of one segment, block by block. window: None if it is longer than the segment."""
    if options.softcap is not None or options.sinks is not None:
        block = partial(_by_scores, options=options, window=window)
        return _in_blocks(block, q, k, v, window, recompute=k.shape[2] > BLOCK)
    block = partial(_by_mask, options=options, window=window)
    return _in_blocks(block, q, k, widen(v, q.shape[-1]), window)[..., : v.shape[-1]]


def _in_blocks(
    block: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, window: int | None, *, recompute: bool = False
) -> Tensor:
    """Apply `block(q, k, v, offset)` to blocks of queries and the keys that they can see."""
    parts = []
    ahead = k.shape[2] - q.shape[2]
    for start, stop, first in _blocks(ahead, k.shape[2], window):
        args = (q[:, :, start - ahead : stop - ahead], k[:, :, first:stop], v[:, :, first:stop], start - first)
        # The scores of all blocks are quadratic in memory, so the backward pass recomputes them block by block.
        parts.append(checkpoint(block, *args, use_reentrant=False) if recompute else block(*args))
    return torch.cat(parts, dim=2)


def _blocks(begin: int, length: int, window: int | None) -> Iterator[tuple[int, int, int]]:
    """Yield (first query, end of queries and keys, first visible key) for queries from `begin` on."""
    for start in range(begin, length, BLOCK):
        first = 0 if window is None else max(0, start - window + 1)
        yield start, min(start + BLOCK, length), first


def _visible(num_queries: int, num_keys: int, offset: int, window: int | None, device: torch.device) -> Tensor:
    """Return [queries, keys] bool: whether the query at position i + offset sees key j."""
    ahead = torch.arange(num_queries, device=device)[:, None] + offset - torch.arange(num_keys, device=device)
    return ahead >= 0 if window is None else (ahead >= 0) & (ahead < window)


def _by_mask(q: Tensor, k: Tensor, v: Tensor, offset: int, *, options: AttentionOptions, window: int | None) -> Tensor:
    mask = _visible(q.shape[2], k.shape[2], offset, window, q.device)
    return fused_attention(q, k, v, attn_mask=mask, dropout_p=options.dropout, scale=options.scale)


def _by_scores(
    q: Tensor,  # [B, H, Q, D]
    k: Tensor,  # [B, HK, K, D]
    v: Tensor,
    offset: int,
    *,
    options: AttentionOptions,
    window: int | None,
) -> Tensor:
    """Compute softmax attention explicitly in float32. Supports softcap and sinks (gemma2, gpt_oss) in plain torch."""
    batch, heads, length, _ = q.shape
    groups = heads // k.shape[1]
    scores = q.unflatten(1, (-1, groups)) @ k[:, :, None].transpose(-1, -2) * options.scale  # [B, HK, G, Q, K]
    scores = scores.flatten(1, 2).to(torch.promote_types(q.dtype, torch.float32))
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    scores = scores.masked_fill(~_visible(length, k.shape[2], offset, window, q.device), float("-inf"))
    if options.sinks is not None:
        column = options.sinks.to(scores.dtype).view(1, heads, 1, 1).expand(batch, heads, length, 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(dim=-1)[..., : k.shape[2]].to(q.dtype)
    weights = F.dropout(weights, options.dropout) if options.dropout else weights
    return (weights.unflatten(1, (-1, groups)) @ v[:, :, None]).flatten(1, 2)
