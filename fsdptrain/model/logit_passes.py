"""The passes over the logits of a chunk, between the products with the head. The formulas are those of `logprobs`.

They run in float32 or higher, over a few rows at a time that fit in a cache.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fsdptrain.types import UNTRUNCATED, Truncation

# Value of logits outside K. Their softmax is 0. Multiplied by a probability of 0 they give 0, where -inf gives NaN.
EXCLUDED = -1e30
# Logits processed at a time: 512 KiB of float32 per CPU core, 128 MiB on a device.
_PER_CORE, _PER_DEVICE = 2**17, 2**25


@dataclass(frozen=True)
class HeadTransform:
    """The transform from `hidden @ weight.T + bias` to the input of the softmax, in field order."""

    logit_scale: float = 1.0  # multiplies (for granite: the inverse of its logits_scaling)
    softcap: float | None = None  # cap * tanh(logits / cap)
    temperature: float = 1.0  # divides
    truncation: Truncation = UNTRUNCATED  # applied last


@dataclass(frozen=True)
class LogitRows:
    """What the backward pass needs of rows of raw logits [C, V], each [C]. The forward pass writes all but labels."""

    labels: Tensor  # i64
    logsumexp: Tensor
    entropy: Tensor | None  # None: not wanted
    floor: Tensor | None  # smallest z in K; None: no truncation

    def __getitem__(self, rows: slice) -> "LogitRows":
        return LogitRows(*(None if x is None else x[rows] for x in vars(self).values()))  # type: ignore[arg-type]


@dataclass(frozen=True)
class RowGrads:
    """Gradients of the results of rows, each [C]. None: no gradient."""

    logprobs: Tensor | None
    entropy: Tensor | None

    def __getitem__(self, rows: slice) -> "RowGrads":
        return RowGrads(*(None if x is None else x[rows] for x in vars(self).values()))


def forward_rows(
    raw: Tensor, rows: LogitRows, transform: HeadTransform, logprobs: Tensor, group: dist.ProcessGroup | None
) -> None:
    """Write `rows`, and the logprobs [C] of the labels, from the raw logits [C, V].

    group: the ranks that have the other columns of the logits.
    """
    for block, part in row_blocks(raw) if group is None else [(slice(None), raw)]:
        _forward_block(part, rows[block], transform, logprobs[block], group)


def _forward_block(
    raw: Tensor, rows: LogitRows, transform: HeadTransform, logprobs: Tensor, group: dist.ProcessGroup | None
) -> None:
    z = transformed(raw, transform)
    owned = _owned(rows.labels, raw, group)
    chosen = z.gather(1, (rows.labels if owned is None else rows.labels.where(owned, 0))[:, None])[:, 0]
    if rows.floor is not None:
        from fsdptrain.model.truncation import smallest_kept

        rows.floor.copy_(torch.minimum(smallest_kept(z, transform.truncation), chosen))
        z.masked_fill_(z < rows.floor[:, None], EXCLUDED)
    highest = z.amax(1)
    if group is not None:
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    z.sub_(highest[:, None])
    with_entropy = rows.entropy is not None
    weights = z.exp() if with_entropy else z.exp_()
    sums = [weights.sum(1), chosen, *([weights.mul_(z).sum(1)] if with_entropy else [])]
    if owned is not None:
        sums[1] = chosen.where(owned, 0.0)
        stacked = torch.stack(sums)
        dist.all_reduce(stacked, group=group)
        sums = list(stacked)
    lse = sums[0].log()
    rows.logsumexp.copy_(lse + highest)
    logprobs.copy_(sums[1] - highest - lse)
    if rows.entropy is not None:
        rows.entropy.copy_(lse - sums[2] / sums[0])


def backward_rows(
    raw: Tensor,
    rows: LogitRows,
    transform: HeadTransform,
    grads: RowGrads,
    grad_bias: Tensor | None,
    group: dist.ProcessGroup | None,
) -> None:
    """Write the gradient of the raw logits [C, V] over them, and add its sum over the rows to grad_bias [V]."""
    for block, part in row_blocks(raw):
        dz = grad_raw(part, rows[block], transform, grads[block], owned=_owned(rows.labels[block], raw, group))
        if grad_bias is not None:
            grad_bias += dz.sum(0)
        if dz is not part:
            part.copy_(dz)


def _owned(labels: Tensor, raw: Tensor, group: dist.ProcessGroup | None) -> Tensor | None:
    return None if group is None else (labels >= 0) & (labels < raw.shape[1])


def row_blocks(raw: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield (rows, logits [B, V] of these rows) in blocks that fit in a cache."""
    if raw.device.type == "cpu":
        size = torch.get_num_threads() * max(1, _PER_CORE // raw.shape[1])
    else:
        size = max(1, _PER_DEVICE // raw.shape[1])
    start = 0
    for part in raw.split(size):
        yield slice(start, start + len(part)), part
        start += len(part)


def transformed(raw: Tensor, transform: HeadTransform, *, out: Tensor | None = None) -> Tensor:
    """Return `raw` after scale, cap and temperature, in float32 or higher: in `out` [C, V] or a new tensor."""
    exact = raw.to(torch.promote_types(raw.dtype, torch.float32))
    if transform.softcap is None:
        return torch.mul(exact, transform.logit_scale / transform.temperature, out=out)
    z = torch.mul(exact, transform.logit_scale / transform.softcap, out=out)
    return z.tanh_().mul_(transform.softcap / transform.temperature)


def grad_raw(
    raw: Tensor,  # [C, V]
    rows: LogitRows,
    transform: HeadTransform,
    grads: RowGrads,
    *,
    owned: Tensor | None = None,  # [C] bool, if only some labels are in these columns
) -> Tensor:
    """Compute the gradient of the raw logits [C, V], before scale, cap and temperature, in float32 or higher.

    Overwrites `raw` unless its dtype is smaller: on a CPU, new memory costs more than the computation.
    """
    z = transformed(raw, transform, out=raw if raw.dtype.itemsize >= torch.float32.itemsize else None)
    slope = _slope_of(z, transform)
    if rows.floor is not None:
        z.masked_fill_(z < rows.floor[:, None], EXCLUDED)
    factor = 1.0 if isinstance(slope, Tensor) else slope  # scaling the row gradients is cheaper than scaling the logits
    scaled = RowGrads(*(None if grad is None else grad * factor for grad in vars(grads).values()))
    dz = _grad_logits(z.sub_(rows.logsumexp[:, None]), rows, scaled, owned)
    return dz.mul_(slope) if isinstance(slope, Tensor) else dz


def _slope_of(z: Tensor, transform: HeadTransform) -> Tensor | float:
    """Compute dz / draw from z: with a softcap tanh' = 1 - tanh^2, and tanh = z * temperature / cap."""
    factor = transform.logit_scale / transform.temperature
    if transform.softcap is None:
        return factor
    return (z * (transform.temperature / transform.softcap)).square_().neg_().add_(1.0).mul_(factor)


def _grad_logits(
    logp: Tensor,  # [C, V] = z - logsumexp(z); overwritten
    rows: LogitRows,
    grads: RowGrads,
    owned: Tensor | None,
) -> Tensor:
    """Compute dz [C, V], reusing existing buffers."""
    grad_logprobs, grad_entropy = grads.logprobs, grads.entropy
    if grad_entropy is None:
        dz = logp.exp_()
        if grad_logprobs is None:
            return dz.zero_()
        dz.mul_(-grad_logprobs[:, None])
    else:
        assert rows.entropy is not None, "it has a gradient"
        p = logp.exp()
        dz = logp.add_(rows.entropy[:, None]).mul_(-grad_entropy[:, None])
        if grad_logprobs is not None:
            dz.sub_(grad_logprobs[:, None])
        dz.mul_(p)
    if grad_logprobs is not None:
        labels = rows.labels
        places = torch.arange(len(labels), device=labels.device)
        if owned is not None:
            labels, grad_logprobs = labels.where(owned, 0), grad_logprobs.where(owned, 0.0)
        dz.index_put_((places, labels), grad_logprobs, accumulate=True)  # scatter_add_ is not deterministic on CUDA
    return dz
