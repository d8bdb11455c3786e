"""From a PackedBatch to what a transformers model is called with, and back to tokens.

Two layouts hold the same tokens. `packed`: one row of T tokens, with boundaries. `padded`: N rows of S tokens, as many
as the longest segment has, tokens at the left; a causal model never looks to the right, so padding needs no mask and
changes nothing. Nothing outside this file knows which one it is: [T] goes in, [T] comes out.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from fsdptrain.models.attention import OURS, Boundaries, attention_kwargs
from fsdptrain.types import PackedBatch

Layout = Literal["packed", "padded"]


def model_inputs(
    batch: PackedBatch, layout: Layout, *, attn_implementation: str, pad_token_id: int | None
) -> dict[str, Any]:
    """Keyword arguments of a transformers model, in rows. Raises where a segment has a prefix: not supported yet."""
    torch._assert_async((batch.prefix_segment < 0).all(), "shared prefixes are not supported")  # does not wait
    if layout == "packed":
        tokens = {"input_ids": batch.input_ids[None], "position_ids": batch.position_ids[None]}
        return {**tokens, "use_cache": False, **attention_kwargs(batch)}
    fill = int(pad_token_id == 0)  # any token will do but the pad token, at which transformers warns
    ids = to_rows(batch.input_ids, batch, layout, fill=fill)
    inputs: dict[str, Any] = {"input_ids": ids.view(len(batch.seqlens), batch.max_seqlen), "use_cache": False}
    if attn_implementation in OURS:
        inputs["boundaries"] = Boundaries(batch.seqlens, batch.cu_seqlens, padded=True)
    return inputs


def to_rows(values: Tensor, batch: PackedBatch, layout: Layout, *, fill: int) -> Tensor:
    """[T, ...] of the tokens of the pack -> [R, ...] of the model's flattened rows, with `fill` at padding."""
    if layout == "packed":
        return values
    rows = values.new_full((len(batch.seqlens) * batch.max_seqlen, *values.shape[1:]), fill)
    return rows.index_copy(0, _padded_index(batch, _every(batch)), values)


def from_rows(rows: Tensor, batch: PackedBatch, layout: Layout) -> Tensor:
    """[R, ...] of the model's flattened rows -> [T, ...] of the tokens of the pack."""
    return rows if layout == "packed" else rows.index_select(0, _padded_index(batch, _every(batch)))


def select_tokens(rows: Tensor, batch: PackedBatch, layout: Layout, positions: Tensor) -> Tensor:
    """The vectors [M, D] of the tokens at `positions` [M] of the pack; rows are [1, T, D] packed, [N, S, D] padded."""
    index = positions if layout == "packed" else _padded_index(batch, positions)
    return rows.flatten(0, 1).index_select(0, index)


def _every(batch: PackedBatch) -> Tensor:
    return torch.arange(batch.num_tokens, device=batch.input_ids.device)


def _padded_index(batch: PackedBatch, positions: Tensor) -> Tensor:
    """Where the tokens at `positions` [M] of the pack lie in the flattened rows."""
    row = torch.searchsorted(batch.cu_seqlens[1:], positions.to(torch.int32), right=True)
    return row * batch.max_seqlen + positions - batch.cu_seqlens[row]
