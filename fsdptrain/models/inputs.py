"""From a PackedBatch to what a transformers model is called with, and back to tokens.

Two layouts hold the same tokens. `packed`: one row of T tokens, with boundaries. `padded`: N rows of S tokens, as many
as the longest segment has, tokens at the left; a causal model never looks to the right, so padding needs no mask and
changes nothing. Nothing outside this file knows which one it is: [T] goes in, [T] comes out. That holds for shared
prefixes too: the one row of a pack that has some holds only the C tokens that are computed.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from fsdptrain.errors import NumericsError
from fsdptrain.models.attention import OURS, Boundaries, attention_kwargs
from fsdptrain.types import PackedBatch

Layout = Literal["packed", "padded"]


def model_inputs(
    batch: PackedBatch, layout: Layout, *, attn_implementation: str, pad_token_id: int | None
) -> dict[str, Any]:
    """Keyword arguments of a transformers model, in rows. NumericsError where they cannot hold shared prefixes."""
    if batch.shared is not None and (layout != "packed" or attn_implementation not in OURS):
        raise NumericsError(f"shared prefixes need packs and our attention, not {layout} with {attn_implementation}")
    if layout == "packed":
        ids, positions = (to_rows(x, batch, layout, fill=0)[None] for x in (batch.input_ids, batch.position_ids))
        return {"input_ids": ids, "position_ids": positions, "use_cache": False, **attention_kwargs(batch)}
    fill = int(pad_token_id == 0)  # any token will do but the pad token, at which transformers warns
    ids = to_rows(batch.input_ids, batch, layout, fill=fill)
    inputs: dict[str, Any] = {"input_ids": ids.view(len(batch.seqlens), batch.max_seqlen), "use_cache": False}
    if attn_implementation in OURS:
        inputs["boundaries"] = Boundaries(batch.seqlens, batch.cu_seqlens, padded=True)
    return inputs


def to_rows(values: Tensor, batch: PackedBatch, layout: Layout, *, fill: int) -> Tensor:
    """[T, ...] of the tokens of the pack -> [R, ...] of the model's flattened rows, with `fill` at padding."""
    if layout == "packed":
        return values if batch.shared is None else values.index_select(0, batch.shared.computed)
    rows = values.new_full((len(batch.seqlens) * batch.max_seqlen, *values.shape[1:]), fill)
    return rows.index_copy(0, _padded_index(batch, _every(batch)), values)


def from_rows(rows: Tensor, batch: PackedBatch, layout: Layout) -> Tensor:
    """[R, ...] of the model's flattened rows -> [T, ...] of the tokens of the pack."""
    if layout == "packed":
        return rows if batch.shared is None else rows.index_select(0, batch.shared.rows)
    return rows.index_select(0, _padded_index(batch, _every(batch)))


def select_tokens(rows: Tensor, batch: PackedBatch, layout: Layout, positions: Tensor) -> Tensor:
    """The vectors [M, D] of the tokens at `positions` [M] of the pack; rows are [1, T, D] packed, [N, S, D] padded."""
    index = _packed_index(batch, positions) if layout == "packed" else _padded_index(batch, positions)
    return rows.flatten(0, 1).index_select(0, index)


def _every(batch: PackedBatch) -> Tensor:
    return torch.arange(batch.num_tokens, device=batch.input_ids.device)


def _packed_index(batch: PackedBatch, positions: Tensor) -> Tensor:
    """Where the tokens at `positions` [M] of the pack lie in the one row."""
    return positions if batch.shared is None else batch.shared.rows.index_select(0, positions)


def _padded_index(batch: PackedBatch, positions: Tensor) -> Tensor:
    """Where the tokens at `positions` [M] of the pack lie in the flattened rows."""
    row = torch.searchsorted(batch.cu_seqlens[1:], positions.to(torch.int32), right=True)
    return row * batch.max_seqlen + positions - batch.cu_seqlens[row]
