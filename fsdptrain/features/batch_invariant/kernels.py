"""Linear layers and attention whose result for a token does not depend on the other rows of the call.

Matrix products select their code by the shapes, so the sum over a row may be done in another order in a larger batch.
Here every product has one shape: blocks of rows, padded with zeros. Attention sums over blocks of keys in order, so
keys after the last one of a query add exact zeros. Functions such as exp take other code at the end of a tensor and of
the part of each thread: they get blocks that are whole vectors and too small for several threads. Sums over the last
dimension, sums and products of elements need no such care.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

ROWS = 64  # rows of a product
QUERIES, KEYS = 16, 64  # of a block of attention
ELEMENTS = 2**15  # of a call of an elementwise function; torch uses several threads for more
ELEMENTWISE = (
    F.silu, F.gelu, F.softplus, torch.exp, Tensor.exp, torch.sigmoid, Tensor.sigmoid, torch.tanh, Tensor.tanh,
    torch.cos, Tensor.cos, torch.sin, Tensor.sin,
)  # fmt: skip


class Invariant(TorchFunctionMode):
    """Within it, linear layers and attention run on the functions of this module."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return linear(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return attention(*args, **kwargs)
        if func in ELEMENTWISE:
            return elementwise(func, *args, **kwargs)
        return func(*args, **kwargs)


@contextmanager
def invariant() -> Iterator[None]:
    with Invariant():
        yield


def elementwise(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Apply `func` to blocks of `ELEMENTS` elements."""
    flat = x.reshape(-1)
    blocks = F.pad(flat, (0, -flat.numel() % ELEMENTS)).split(ELEMENTS)
    with torch._C.DisableTorchFunction():
        return torch.cat([func(block, *args, **kwargs) for block in blocks])[: flat.numel()].reshape(x.shape)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` in blocks of `ROWS` rows. [..., D] -> [..., V]"""
    flat = x.reshape(-1, x.shape[-1])
    blocks = F.pad(flat, (0, 0, 0, -len(flat) % ROWS)).split(ROWS)
    with torch._C.DisableTorchFunction():
        out = torch.cat([F.linear(block, weight, bias) for block in blocks])
    return out[: len(flat)].reshape(*x.shape[:-1], weight.shape[0])


def attention(
    query: Tensor,  # [B, H, S, D]
    key: Tensor,  # [B, HK, L, D]
    value: Tensor,  # [B, HK, L, DV]
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # [B, H, S, DV]
    """`F.scaled_dot_product_attention`, invariant if each query sees all keys up to its own but padding before them.

    Other masks (windows, towers that are not causal) and dropout are left to torch.
    """
    if attn_mask is not None and attn_mask.shape[2] == 1 < query.shape[2]:
        # transformers has put the heads of one key head where the tokens are, for one token
        one = query.reshape(len(query), -1, 1, query.shape[-1])
        return attention(one, key, value, attn_mask, dropout_p, scale=scale).reshape(*query.shape[:3], -1)
    pads = None if dropout_p else _padding(query, key, attn_mask, is_causal=is_causal)
    groups = query.shape[1] // key.shape[1]
    if pads is None:
        options = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
        with torch._C.DisableTorchFunction():
            return F.scaled_dot_product_attention(query, key, value, enable_gqa=enable_gqa or groups > 1, **options)
    key, value = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (key, value))
    query = query * (query.shape[-1] ** -0.5 if scale is None else scale)
    width, earlier = query.shape[2], key.shape[2] - query.shape[2]
    rows = [
        _of_row(q[:, max(0, pad - earlier) :], k[:, pad:], v[:, pad:])
        for q, k, v, pad in zip(query, key, value, pads, strict=True)
    ]
    return torch.stack([F.pad(row, (0, 0, width - row.shape[1], 0)) for row in rows])


def _padding(query: Tensor, key: Tensor, mask: Tensor | None, *, is_causal: bool) -> list[int] | None:
    """Return the number of keys before each sequence [B], or None if queries do not see all keys up to their own."""
    (count, _, width, _), length = query.shape, key.shape[2]
    if mask is None:
        return [0] * count if width == 1 or (is_causal and width == length) else None
    if mask.dtype != torch.bool or is_causal:
        return None
    pads = mask[:, 0, -1].int().argmax(-1)
    at = torch.arange(length, device=mask.device)
    seen = (at <= at[length - width :, None]) & (at >= pads[:, None, None])
    real = at[length - width :] >= pads[:, None]  # queries that are not padding
    if not torch.equal((mask[:, 0] & real[..., None]), seen & real[..., None]) or mask.shape[1] != 1:
        return None
    return pads.tolist() * (count // len(pads))


def _of_row(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute the attention of one sequence. [H, S, D], [H, L, D], [H, L, DV] -> [H, S, DV]

    A query stands at its position modulo `QUERIES` in its block, wherever the call begins.
    """
    dtype = query.dtype
    query, key, value = (x.to(torch.promote_types(dtype, torch.float32)) for x in (query, key, value))
    (heads, count, _), length = query.shape, key.shape[1]
    first = length - count
    before = first % QUERIES
    after = -(before + count) % QUERIES
    queries = F.pad(query, (0, 0, before, after))
    keys, values = (F.pad(x, (0, 0, 0, -length % KEYS)) for x in (key, value))
    positions = torch.arange(first - before, first - before + queries.shape[1], device=query.device)
    parts = [
        _of_block(q.contiguous(), keys, values, at)
        for q, at in zip(queries.split(QUERIES, dim=1), positions.split(QUERIES), strict=True)
    ]
    return torch.cat(parts, dim=1)[:, before : before + count].to(dtype).reshape(heads, count, value.shape[-1])


def _of_block(query: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """[H, QUERIES, D], [H, L, D], [H, L, DV], positions [QUERIES] of the queries -> [H, QUERIES, DV]"""
    scores = []
    for start, block in enumerate(keys.split(KEYS, dim=1)):
        at = torch.arange(start * KEYS, (start + 1) * KEYS, device=query.device)
        product = query @ block.transpose(1, 2).contiguous()
        scores.append(product.masked_fill(at > positions[:, None], -torch.inf))
    highest = torch.stack([block.amax(-1) for block in scores]).amax(0)[..., None]
    weights = [elementwise(torch.exp, block - highest) for block in scores]
    total, out = torch.zeros_like(highest), torch.zeros_like(query[..., :1]).expand(*query.shape[:2], values.shape[-1])
    for block, v in zip(weights, values.split(KEYS, dim=1), strict=True):
        total = total + block.sum(-1, keepdim=True)
        out = out + block @ v.contiguous()
    return out / total
