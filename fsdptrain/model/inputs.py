"""From a PackedBatch to what a transformers model is called with, and back to tokens.

Two layouts hold the same tokens. `packed`: one row of T tokens, with boundaries. `padded`: N rows of S tokens, as many
as the longest segment has, tokens at the left; a causal model never looks to the right, so padding needs no mask and
changes nothing. Nothing outside this file knows which one it is: [T] goes in, [T] comes out. That holds for shared
prefixes too: the one row of a pack that has some holds only the C tokens that are computed.

With a context the columns of the rows, made even by some more at the right, are dealt over its ranks. Then rows are
those of this rank, and so are tokens: `tokens_here` says which.
"""

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fsdptrain.errors import NumericsError
from fsdptrain.features.context_parallel.ulysses import UlyssesGroup
from fsdptrain.model.attention.attention import OURS, Boundaries, attention_kwargs
from fsdptrain.types import PackedBatch

Layout = Literal["packed", "padded"]


def model_inputs(
    batch: PackedBatch,
    layout: Layout,
    *,
    attn_implementation: str,
    pad_token_id: int | None,
    context: UlyssesGroup | None = None,
) -> dict[str, Any]:
    """Keyword arguments of a transformers model, in rows. NumericsError where they cannot hold shared prefixes."""
    if batch.shared is not None and (layout != "packed" or attn_implementation not in OURS or context is not None):
        raise NumericsError(f"shared prefixes need whole packs and our attention, not {layout}, {attn_implementation}")
    fill = int(pad_token_id == 0)  # any token will do but the pad token, at which transformers warns
    if layout == "packed":
        batch = batch if context is None else _lengthened(batch, _width(batch, layout, context), fill=fill)
        found = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
        tokens = {name: _computed(values, batch)[None] for name, values in found.items()}
        return {**_dealt(tokens, context), "use_cache": False, **attention_kwargs(batch, context)}
    width = _width(batch, layout, context)
    tokens = {"input_ids": _whole_rows(batch.input_ids, batch, layout, context, fill=fill).view(-1, width)}
    if context is not None:  # the model would number the columns of this rank
        columns = torch.arange(width, device=batch.input_ids.device).clamp(max=batch.max_seqlen - 1)
        tokens["position_ids"] = columns.expand(len(batch.seqlens), -1)
    inputs: dict[str, Any] = {**_dealt(tokens, context), "use_cache": False}
    if attn_implementation in OURS:
        seqlens = batch.seqlens if context is None else (width,) * len(batch.seqlens)
        inputs["boundaries"] = Boundaries(seqlens, batch.cu_seqlens, padded=True, context=context)
    return inputs


def to_rows(
    values: Tensor, batch: PackedBatch, layout: Layout, *, fill: int, context: UlyssesGroup | None = None
) -> Tensor:
    """[T, ...] of the tokens of the pack -> [R, ...] of the model's flattened rows, with `fill` at padding."""
    rows = _whole_rows(values, batch, layout, context, fill=fill)
    if context is None:
        return rows
    return context.own_columns(rows.unflatten(0, (-1, _width(batch, layout, context)))).flatten(0, 1)


def from_rows(
    rows: Tensor, batch: PackedBatch, layout: Layout, tokens: Tensor, *, context: UlyssesGroup | None = None
) -> Tensor:
    """[R, ...] of the model's flattened rows -> [T, ...] of the tokens of the pack, with a context those here.

    tokens: as `tokens_here` says.
    """
    if layout == "packed" and context is None:
        return rows if batch.shared is None else rows.index_select(0, batch.shared.rows)
    return rows.index_select(0, _places(batch, layout, tokens, context))


def select_tokens(
    rows: Tensor, batch: PackedBatch, layout: Layout, positions: Tensor, *, context: UlyssesGroup | None = None
) -> Tensor:
    """The vectors [M, D] of the tokens at `positions` [M] of the pack; rows are [1, T, D] packed, [N, S, D] padded."""
    return rows.flatten(0, 1).index_select(0, _places(batch, layout, positions, context))


def to_pack(values: Tensor, positions: Tensor, batch: PackedBatch, *, context: UlyssesGroup | None = None) -> Tensor:
    """[M, ...] of the tokens at `positions` [M], which are here -> [T, ...] of the pack, on every rank, else zeros."""
    found = torch.zeros(batch.num_tokens, *values.shape[1:], dtype=values.dtype, device=values.device)
    found = found.index_copy(0, positions, values)
    return found if context is None else context.total(found)


def tokens_here(batch: PackedBatch, layout: Layout, context: UlyssesGroup | None, *, with_loss: bool = False) -> Tensor:
    """Tokens of the pack, all or those with a loss, that are in the rows of this rank: their positions, in order.

    How many they are differs between ranks, and the host knows it: this does not wait for the device.
    """
    device = batch.input_ids.device
    found = batch.loss_positions if with_loss else torch.arange(batch.num_tokens, device=device)
    if context is None:
        return found
    places = batch.loss_places if with_loss else np.arange(batch.num_tokens)
    if layout == "padded":
        ends = np.cumsum(batch.seqlens)
        places = places - (ends - batch.seqlens)[np.searchsorted(ends, places, side="right")]
    num_here = np.count_nonzero(places % context.size == context.rank)
    _, column = _cells(batch, layout, found)
    here_first = (column % context.size != context.rank).int().argsort(stable=True)
    return found.index_select(0, here_first[:num_here])


def _lengthened(batch: PackedBatch, width: int, *, fill: int) -> PackedBatch:
    """With one more segment, up to `width` tokens, for the model alone."""
    more = width - batch.num_tokens
    if not more:
        return batch
    return replace(
        batch,
        input_ids=F.pad(batch.input_ids, (0, more), value=fill),
        position_ids=torch.cat([batch.position_ids, torch.arange(more, device=batch.position_ids.device)]),
        cu_seqlens=F.pad(batch.cu_seqlens, (0, 1), value=width),
        seqlens=(*batch.seqlens, more),
    )


def _computed(values: Tensor, batch: PackedBatch) -> Tensor:
    """[T, ...] -> [C, ...]: prefixes that are shared are computed once."""
    return values if batch.shared is None else values.index_select(0, batch.shared.computed)


def _dealt(inputs: dict[str, Tensor], context: UlyssesGroup | None) -> dict[str, Tensor]:
    return inputs if context is None else {name: context.own_columns(rows) for name, rows in inputs.items()}


def _width(batch: PackedBatch, layout: Layout, context: UlyssesGroup | None) -> int:
    """Columns of the rows, of all ranks together."""
    columns = batch.num_tokens if layout == "packed" else batch.max_seqlen
    return columns if context is None else columns + -columns % context.size


def _whole_rows(
    values: Tensor, batch: PackedBatch, layout: Layout, context: UlyssesGroup | None, *, fill: int
) -> Tensor:
    """[T, ...] -> [rows x width, ...], before columns are dealt."""
    width = _width(batch, layout, context)
    if layout == "packed" and width == batch.num_tokens:
        return _computed(values, batch)
    num_rows = 1 if layout == "packed" else len(batch.seqlens)
    rows = values.new_full((num_rows * width, *values.shape[1:]), fill)
    row, column = _cells(batch, layout, torch.arange(batch.num_tokens, device=values.device))
    return rows.index_copy(0, row * width + column, values)


def _places(batch: PackedBatch, layout: Layout, positions: Tensor, context: UlyssesGroup | None) -> Tensor:
    """Where the tokens at `positions` [M] of the pack, which are here, lie in the flattened rows."""
    if layout == "packed" and context is None:
        return positions if batch.shared is None else batch.shared.rows.index_select(0, positions)
    row, column = _cells(batch, layout, positions)
    width = _width(batch, layout, context)
    return row * width + column if context is None else (row * width + column) // context.size


def _cells(batch: PackedBatch, layout: Layout, positions: Tensor) -> tuple[Tensor | int, Tensor]:
    """Row and column, among those of all ranks, of the tokens at `positions` [M]."""
    if layout == "packed":
        return 0, positions
    row = torch.searchsorted(batch.cu_seqlens[1:], positions.to(torch.int32), right=True)
    return row, positions - batch.cu_seqlens[row]
