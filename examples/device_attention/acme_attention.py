"""Attention over packs by one call for a device of your own: see docs/own_parts.md."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdptrain.model.attention.attention import AttentionOptions, Boundaries, packed_attention


def attention(query: Tensor, key: Tensor, value: Tensor, boundaries: Boundaries, options: AttentionOptions) -> Tensor:
    """[1, H, T, D], [1, HK, T, D], [1, HK, T, DV] -> [1, T, H, DV]. Put the kernel of the device here.

    This one computes all scores at once and masks those between sequences, so it takes O(T^2) of memory.
    """
    special = (options.window, options.softcap, options.sinks)
    if boundaries.padded or any(option is not None for option in special):
        return packed_attention(query, key, value, boundaries, options)  # one sequence at a time, on any device
    lengths = boundaries.cu_seqlens.diff()
    segment = torch.repeat_interleave(torch.arange(len(lengths), device=query.device), lengths)
    mask = (segment[:, None] == segment).tril()
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
    out = F.scaled_dot_product_attention(query, key, value, mask, options.dropout, scale=options.scale)
    return out.transpose(1, 2)
