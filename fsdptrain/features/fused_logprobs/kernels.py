"""Triton kernels for the passes of `model.logprobs` over the logits: one read forward, one write backward.

With raw logits x [C, V] of a chunk, z = cap(scale * x) / temperature, and the tokens K that truncated sampling keeps:

    forward    logprob, logsumexp and entropy of a row from one read of x, with a running maximum
    backward   dx, written over x: one read and one write

The formulas are those of the module docstring of `model.logprobs`. One program works on one row, in blocks of columns.
All arithmetic is in float32, or in float64 if x is float64. The running sums follow Milakov and Gimelshein, "Online
normalizer calculation for softmax", arXiv 1805.02867; for the entropy, sum(exp(z - m) * (z - m)) is carried along.
"""

from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from fsdptrain.model.logit_passes import EXCLUDED, HeadTransform, LogitRows, RowGrads, row_blocks
from fsdptrain.model.truncation import smallest_kept

BLOCK, NUM_WARPS = 4096, 8
_LOWEST = tl.constexpr(EXCLUDED)  # also of columns beyond the vocabulary


class TritonPasses:
    """The passes as Triton kernels. All kernels compute z bitwise like `transform_kernel`."""

    group: dist.ProcessGroup | None = None  # all columns are here

    def forward(self, raw: Tensor, rows: LogitRows, transform: HeadTransform, logprobs: Tensor) -> None:
        if rows.floor is not None:
            for block, part in row_blocks(raw):
                z = part.new_empty(part.shape, dtype=rows.floor.dtype)
                _launch(transform_kernel, part, z, **_common(part, transform))
                chosen = z.gather(1, rows.labels[block, None])[:, 0]
                rows.floor[block] = torch.minimum(smallest_kept(z, transform.truncation), chosen)
        absent = logprobs  # any tensor in place of an absent one
        _launch(
            forward_kernel,
            raw,
            rows.labels,
            absent if rows.floor is None else rows.floor,
            logprobs,
            rows.logsumexp,
            absent if rows.entropy is None else rows.entropy,
            **_common(raw, transform),
            TRUNCATED=rows.floor is not None,
            WITH_ENTROPY=rows.entropy is not None,
        )

    def backward(
        self, raw: Tensor, rows: LogitRows, transform: HeadTransform, grads: RowGrads, grad_bias: Tensor | None
    ) -> None:
        absent = rows.logsumexp
        _launch(
            backward_kernel,
            raw,
            rows.labels,
            absent if rows.floor is None else rows.floor,
            rows.logsumexp,
            absent if rows.entropy is None else rows.entropy,
            absent if grads.logprobs is None else grads.logprobs.contiguous(),
            absent if grads.entropy is None else grads.entropy.contiguous(),
            **_common(raw, transform),
            TRUNCATED=rows.floor is not None,
            OF_LOGPROBS=grads.logprobs is not None,
            OF_ENTROPY=grads.entropy is not None,
        )
        if grad_bias is not None:
            grad_bias += raw.sum(0, dtype=grad_bias.dtype)


def _launch(kernel: Any, raw: Tensor, *arguments: Tensor, **options: Any) -> None:
    """Run one program per row of `raw`."""
    kernel[(len(raw),)](raw, *arguments, **options)


def _common(raw: Tensor, transform: HeadTransform) -> dict[str, Any]:
    cap, temperature = transform.softcap, transform.temperature
    return {
        "stride": raw.stride(0),
        "num_columns": raw.shape[1],
        "FIRST": transform.logit_scale / (temperature if cap is None else cap),
        "SECOND": 1.0 if cap is None else cap / temperature,
        "CAPPED": cap is not None,
        "EXACT": tl.float64 if raw.dtype == torch.float64 else tl.float32,
        "BLOCK": min(BLOCK, triton.next_power_of_2(raw.shape[1])),
        "num_warps": NUM_WARPS,
    }


@triton.jit
def _tanh(x):
    """tanh: Lambert's continued fraction to 19, as one ratio of polynomials, where |x| < 1; else by exp."""
    s = x * x
    above = 654729075.0 + s * (91891800.0 + s * (2837835.0 + s * (25740.0 + s * 55.0)))
    below = 654729075.0 + s * (310134825.0 + s * (18918900.0 + s * (315315.0 + s * (1485.0 + s))))
    far = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(x)) + 1.0)
    return tl.where(s < 1.0, x * (above / below), tl.where(x < 0, -far, far))


@triton.jit
def _transformed(raw, FIRST: tl.constexpr, SECOND: tl.constexpr, CAPPED: tl.constexpr):
    if CAPPED:
        return _tanh(raw * FIRST) * SECOND
    return raw * FIRST


@triton.jit
def transform_kernel(
    raw, z, stride, num_columns, FIRST: tl.constexpr, SECOND: tl.constexpr, CAPPED: tl.constexpr, EXACT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < num_columns
        x = tl.load(raw + row * stride + columns, mask=inside, other=0.0).to(EXACT)
        tl.store(z + row * num_columns + columns, _transformed(x, FIRST, SECOND, CAPPED), mask=inside)


@triton.jit
def forward_kernel(
    raw, labels, floors, logprobs, logsumexps, entropies, stride, num_columns,
    FIRST: tl.constexpr, SECOND: tl.constexpr, CAPPED: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr,
    TRUNCATED: tl.constexpr, WITH_ENTROPY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    if TRUNCATED:
        floor = tl.load(floors + row)
    highest = tl.full((), _LOWEST, EXACT)
    total = tl.full((), 0.0, EXACT)  # of exp(z - highest)
    weighted = tl.full((), 0.0, EXACT)  # of exp(z - highest) * (z - highest)
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < num_columns
        x = tl.load(raw + row * stride + columns, mask=inside, other=0.0).to(EXACT)
        z = tl.where(inside, _transformed(x, FIRST, SECOND, CAPPED), _LOWEST)
        if TRUNCATED:
            z = tl.where(z < floor, _LOWEST, z)
        higher = tl.maximum(highest, tl.max(z, 0))
        shift = highest - higher
        scale = tl.exp(shift)
        z = z - higher
        weights = tl.where(inside, tl.exp(z), 0.0)  # a row of -inf must stay without a sum
        if WITH_ENTROPY:
            weighted = scale * (weighted + shift * total) + tl.sum(weights * z, 0)
        total = total * scale + tl.sum(weights, 0)
        highest = higher
    chosen = _transformed(tl.load(raw + row * stride + label).to(EXACT), FIRST, SECOND, CAPPED)
    lse = tl.log(total)
    tl.store(logsumexps + row, lse + highest)
    tl.store(logprobs + row, chosen - highest - lse)
    if WITH_ENTROPY:
        tl.store(entropies + row, lse - weighted / total)


@triton.jit
def backward_kernel(
    raw, labels, floors, logsumexps, entropies, grads_logprobs, grads_entropy, stride, num_columns,
    FIRST: tl.constexpr, SECOND: tl.constexpr, CAPPED: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr,
    TRUNCATED: tl.constexpr, OF_LOGPROBS: tl.constexpr, OF_ENTROPY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    logsumexp = tl.load(logsumexps + row)
    if TRUNCATED:
        floor = tl.load(floors + row)
    if OF_LOGPROBS:
        of_logprob = tl.load(grads_logprobs + row).to(EXACT)
    if OF_ENTROPY:
        of_entropy = tl.load(grads_entropy + row).to(EXACT)
        entropy = tl.load(entropies + row)
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < num_columns
        at = raw + row * stride + columns
        z = _transformed(tl.load(at, mask=inside, other=0.0).to(EXACT), FIRST, SECOND, CAPPED)
        if CAPPED:
            tanh = z / SECOND
            slope = (1.0 - tanh * tanh) * FIRST * SECOND
        else:
            slope = tl.full((), FIRST, EXACT)
        if TRUNCATED:
            z = tl.where(z < floor, _LOWEST, z)
        logp = z - logsumexp
        p = tl.exp(logp)
        dz = tl.zeros_like(p)
        if OF_ENTROPY:
            dz = -of_entropy * p * (logp + entropy)
        if OF_LOGPROBS:
            dz = dz - of_logprob * p + tl.where(columns == label, of_logprob, 0.0)
        tl.store(at, (dz * slope).to(raw.dtype.element_ty), mask=inside)
