"""Attention of segments that share a prefix: merge causal attention over own tokens with attention over the prefix.

The attention over a prefix is one call for all segments that follow it. With logsumexps a and b of the scores of both
parts, out = exp(a - c) out_a + exp(b - c) out_b, c = logaddexp(a, b).

In the backward pass each part gets the merged output and c instead of its own: a flash kernel computes its
probabilities from the logsumexp and the row sums of their gradient from the output, so the result is the part's share
of the full gradient (as in ring attention, arXiv 2310.01889). No keys are copied and no mask is built.

A pack becomes one row that contains each shared prefix once: C <= T tokens are computed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from fsdptrain.errors import NumericsError
from fsdptrain.model.attention.attention import (
    PACKAGE_ATTENTION,
    AttentionOptions,
    Boundaries,
    attention_by_segment,
    segment_spans,
    takes_flash,
    varlen_attention,
    widen,
)
from fsdptrain.model.rows import Layout, PackedRows
from fsdptrain.types import PackedBatch, SharedPrefixes

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_Run = tuple[slice, slice]  # rows of the segments that share a prefix, and rows of the prefix


def shared_prefix_attention(
    shared: SharedPrefixes,
    of_keys: Boundaries,
    query: Tensor,  # [1, H, C, D]
    key: Tensor,  # [1, HK, C, D]
    value: Tensor,  # [1, HK, C, DV]
    boundaries: Boundaries,
    options: AttentionOptions,
) -> Tensor:  # [1, C, H, DV]
    """Compute attention of segments whose shared prefixes are computed once.

    of_keys: boundaries of the whole segments.
    """
    spans = segment_spans(query, boundaries)
    plain = options.softcap is None and options.sinks is None and options.dropout == 0.0
    unlimited = options.window is None or options.window >= max(of_keys.seqlens)
    if plain and unlimited and query.device.type == "cpu":
        width = max(query.shape[-1], value.shape[-1])
        wide = (widen(x, width) for x in (query, key, value))
        merged = merged_attention(*wide, spans=spans, shared=shared, scale=options.scale)
        return merged.transpose(1, 2)[..., : value.shape[-1]]
    key, value = (x.index_select(2, shared.rows) for x in (key, value))
    if takes_flash(query, value, options):
        return varlen_attention(query, key, value, boundaries, options.scale, options.window, of_keys)
    return attention_by_segment(query, key, value, spans, list(of_keys.seqlens), options)


def merged_attention(
    q: Tensor,  # [1, H, C, D]
    k: Tensor,  # [1, HK, C, D]
    v: Tensor,  # [1, HK, C, D]
    *,
    spans: list[int],  # (N,) rows of each segment
    shared: SharedPrefixes,
    scale: float,
) -> Tensor:  # [1, H, C, D]
    """Compute merged attention on a CPU. Its kernel supports no window, softcap, sinks or dropout."""
    out = _Merged.apply(q, k, v, _segments(spans), list(_runs(spans, shared)), scale)
    assert isinstance(out, Tensor)
    return out


def _segments(spans: list[int]) -> list[slice]:
    found, start = [], 0
    for length in spans:
        found.append(slice(start, start + length))
        start += length
    return found


def _runs(spans: list[int], shared: SharedPrefixes) -> Iterator[_Run]:
    rows = _segments(spans)
    prefixes = zip(shared.segments, shared.lengths, rows, strict=True)
    for (first, length), members in groupby(prefixes, key=lambda x: x[:2]):
        if length:
            own = [span for *_, span in members]
            start = rows[first].start
            yield slice(own[0].start, own[-1].stop), slice(start, start + length)


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, segments: list[slice], runs: list[_Run], scale: float
    ) -> Tensor:
        out = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        for at in segments:
            out[:, :, at], lse[:, :, at] = _forward(q[:, :, at], k[:, :, at], v[:, :, at], 0.0, True, scale=scale)
        for at, prefix in runs:
            other, other_lse = _forward(q[:, :, at], k[:, :, prefix], v[:, :, prefix], 0.0, False, scale=scale)
            own_lse = lse[:, :, at]
            both = torch.logaddexp(own_lse, other_lse)
            own = out[:, :, at] * (own_lse - both).exp()[..., None]
            out[:, :, at] = own + other * (other_lse - both).exp()[..., None]
            lse[:, :, at] = both
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.segments, ctx.runs, ctx.scale = segments, runs, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q, k, v))

        def part(at: slice, keys: slice, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
            over = k[:, :, keys], v[:, :, keys]
            said = out[:, :, at], lse[:, :, at]
            return _backward(grads[0][:, :, at], q[:, :, at], *over, *said, 0.0, causal, scale=ctx.scale)

        for at in ctx.segments:
            grad_q[:, :, at], grad_k[:, :, at], grad_v[:, :, at] = part(at, at, True)
        for at, prefix in ctx.runs:
            of_q, of_k, of_v = part(at, prefix, False)
            grad_q[:, :, at] += of_q
            grad_k[:, :, prefix] += of_k
            grad_v[:, :, prefix] += of_v
        return grad_q, grad_k, grad_v, None, None, None


@dataclass(frozen=True)
class SharedPrefixRows(PackedRows):
    """The row of a pack with `batch.shared`."""

    @classmethod
    def of(cls, batch: PackedBatch, layout: Layout, attention: str) -> "SharedPrefixRows":
        """Create the rows. Raises NumericsError if the layout or the attention does not support shared prefixes."""
        if layout != "packed" or attention not in PACKAGE_ATTENTION:
            raise NumericsError(f"shared prefixes need packs and the attention of fsdptrain, not {layout}, {attention}")
        return cls(batch)

    @property
    def shape(self) -> tuple[int, int]:
        return 1, self._shared.num_tokens

    def inputs(self, *, pad_token_id: int | None) -> dict[str, Any]:
        del pad_token_id
        batch, shared = self.batch, self._shared
        own = tuple(x - y for x, y in zip(batch.seqlens, shared.lengths, strict=True))
        of_keys = Boundaries(batch.seqlens, batch.cu_seqlens, padded=False)
        attention = partial(shared_prefix_attention, shared, of_keys)
        # No standard argument describes shared prefixes: a mixer that ignores `boundaries` fails the probe.
        return {
            "input_ids": batch.input_ids.index_select(0, shared.computed)[None],
            "position_ids": batch.position_ids.index_select(0, shared.computed)[None],
            "use_cache": False,
            "boundaries": Boundaries(own, shared.cu_seqlens, padded=False, attention=attention),
        }

    def scatter(self, values: Tensor, *, fill: int) -> Tensor:
        del fill
        return values.index_select(0, self._shared.computed)

    def gather(self, values: Tensor, positions: Tensor | None = None) -> Tensor:
        rows = self._shared.rows
        return values.index_select(0, rows if positions is None else rows.index_select(0, positions))

    @property
    def _shared(self) -> SharedPrefixes:
        assert self.batch.shared is not None
        return self.batch.shared
