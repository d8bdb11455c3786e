"""What torch's varlen_attn and flash_attn_varlen_func of flash-attn are documented to do, and dense attention."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fsdptrain.model.attention import varlen


def dense(
    q: Tensor, k: Tensor, v: Tensor, *, scaling: float, window: int | None, softcap: Any = None, sinks: Any = None
) -> Tensor:
    """Attention of one segment, [1, H, L, .] -> [1, L, H, .]. The last query sees the last key."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) * scaling
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    ahead = torch.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None] - torch.arange(k.shape[2])
    seen = (ahead >= 0) & (ahead < (window or k.shape[2]))  # a window of W keys includes the query's own
    weights = scores.masked_fill(~seen, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.view(1, -1, 1, 1).exp()
    return ((weights / total) @ v).transpose(1, 2)


def varlen_attn(q: Tensor, k: Tensor, v: Tensor, *limits: Any, scale: float, window_size: Any, **gqa: bool) -> Tensor:
    """On [T, heads, width]. A window (W, 0) has W keys and the query's own."""
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert q.shape[-1] % 8 == 0, "the flash kernels require multiples of 8"
    assert gqa == ({"enable_gqa": True} if varlen._VARLEN_HAS_GQA_FLAG else {})
    assert window_size[1] == 0
    return _by_segment(q, k, v, *limits, scale=scale, left=window_size[0])


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    """The signature of flash-attn 2.8. On [T, heads, width]."""
    assert causal
    assert (dropout_p, softcap, alibi_slopes, return_attn_probs, block_table) == (0.0, 0.0, None, False, None)
    limits = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return _by_segment(q, k, v, *limits, scale=softmax_scale, left=window_size[0])


def _by_segment(q: Tensor, k: Tensor, v: Tensor, *limits: Any, scale: float, left: int) -> Tensor:
    of_queries, of_keys = limits[0].tolist(), limits[1].tolist()
    assert limits[2:] == tuple(max(b - a for a, b in pairwise(ends)) for ends in (of_queries, of_keys))
    parts = []
    for (a, b), (c, d) in zip(pairwise(of_queries), pairwise(of_keys), strict=True):
        segment = (x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d]))
        parts.append(dense(*segment, scaling=scale, window=None if left < 0 else left + 1))
    return torch.cat(parts, dim=1)[0]


def require_near(found: Tensor, half: Sequence[Tensor], wanted: Tensor, exact: Sequence[Tensor], *, bound: float):
    """Results and gradients in bfloat16 on a device: of `found` for `half`, near those of `wanted` for `exact`."""
    torch.testing.assert_close(found.double().cpu(), wanted, rtol=0, atol=4e-2)
    found.sum().backward()
    wanted.sum().backward()
    for got, expected in zip(half, exact, strict=True):
        assert got.grad is not None
        assert expected.grad is not None
        torch.testing.assert_close(got.grad.double().cpu(), expected.grad, rtol=5e-2, atol=bound)
