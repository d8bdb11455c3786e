"""Attention over a pack by one call of torch's flash kernel."""

import inspect
from typing import Any

from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from fsdptrain.model.attention.attention import Boundaries, widen

_VARLEN_HAS_GQA_FLAG = "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch 2.11 needs no flag for it


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    boundaries: Boundaries,
    scale: float,
    window: int | None,
    of_keys: Boundaries | None = None,
) -> Tensor:
    """Call torch's flash kernel once for the pack. Returns [1, T, H, DV].

    The kernel requires one head width for q, k and v, a multiple of 8. of_keys: boundaries of the keys, if segments
    have more keys than queries; the last query of a segment is then aligned with its last key.
    """
    width = -(-max(q.shape[-1], v.shape[-1]) // 8) * 8
    queries, keys, values = (widen(x, width)[0].transpose(0, 1) for x in (q, k, v))  # [T, heads, width]
    options: dict[str, Any] = {"enable_gqa": True} if _VARLEN_HAS_GQA_FLAG else {}
    of_keys = of_keys or boundaries
    longest = max(of_keys.seqlens)
    left = -1 if window is None or window >= longest else window - 1  # the kernel counts the keys before the query
    limits = (boundaries.cu_seqlens, of_keys.cu_seqlens, max(boundaries.seqlens), longest)
    out = varlen_attn(queries, keys, values, *limits, scale=scale, window_size=(left, 0), **options)
    assert isinstance(out, Tensor)
    return out[None, :, :, : v.shape[-1]]
