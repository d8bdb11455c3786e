"""Compute logprobs and entropy from hidden states in chunks, without materializing [T, V] or its gradient.

    raw = hidden @ weight.T + bias          the head
    z = cap(scale * raw) / temperature      the model's logit transform, then the rollout temperature
    K = tokens with z >= floor              tokens kept by truncated sampling, and the label; without truncation all
    logprob = z[label] - logsumexp_K(z)
    entropy = logsumexp_K(z) - sum_K(softmax_K(z) * z)

The backward pass recomputes the logits chunk by chunk. With p = softmax_K(z), which is 0 outside K, and the gradients g
of logprob and h of entropy:

    dz = g * (onehot(label) - p) - h * p * (z - logsumexp_K(z) + entropy)

The products with the head run over chunks of tokens, through one buffer of chunk_size x V in the dtype of `hidden`. The
operations between them run in float32 over a few rows at a time that fit in a cache (`_blocks`).

A token costs four products: one forward, one to recompute the logits, and one for each of the two gradients. The last
chunk costs three: its logits stay in the buffer for the backward pass, which starts with that chunk. This needs no
extra memory, and a pack of one chunk computes nothing twice.

The head may be split over the ranks of a tensor group along the vocabulary. No logits are gathered: with m the maximum
of z over all ranks, each chunk sums exp(z - m), exp(z - m) * z and z[label] over the ranks, so the results are bitwise
equal on each. The gradient of the logits needs no communication; that of the hidden states is summed once.

K is computed from the logits of the current policy and extended down to the label: it is the smallest set of most
likely tokens that passes the filters and contains the label. The sampled token is therefore in K despite rounding
errors and optimizer steps, and the logprob is finite and at most 0. (prime-rl and, with a flag, vLLM record the
engine's set instead, as DeepSeek-V3.2 does, arXiv 2512.02556 "keep sampling mask". That is exact even far off-policy,
but costs V bits per token.)
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fsdptrain.model.truncation import UNTRUNCATED, Truncation, smallest_kept
from fsdptrain.overrides import overridable

# Value of logits outside K. Their softmax is 0. Multiplied by a probability of 0 they give 0, where -inf gives NaN.
_EXCLUDED = -1e30
# Logits processed at a time: 512 KiB of float32 per CPU core, 128 MiB on a device.
_PER_CORE, _PER_DEVICE = 2**17, 2**25


@dataclass(frozen=True)
class HeadTransform:
    """The transform from `hidden @ weight.T + bias` to the input of the softmax, in field order."""

    logit_scale: float = 1.0  # multiplies (for granite: the inverse of its logits_scaling)
    softcap: float | None = None  # cap * tanh(logits / cap)
    temperature: float = 1.0  # divides
    truncation: Truncation = UNTRUNCATED  # applied last


class LogitPasses(Protocol):
    """What replaces the passes over the logits of a chunk, raw [C, V], with the formulas of this module.

    labels, floor, logprobs, logsumexp, entropy and their gradients: [C], of the rows of the chunk.
    """

    def transformed(self, raw: Tensor, transform: HeadTransform) -> Tensor:
        """z [C, V], of which `floor` is computed. The other two compute z bitwise like this."""
        ...

    def forward(
        self,
        raw: Tensor,
        transform: HeadTransform,
        labels: Tensor,
        floor: Tensor | None,
        logprobs: Tensor,
        logsumexp: Tensor,
        entropy: Tensor | None,
    ) -> None:
        """Write logprobs, logsumexp and, if wanted, entropy."""
        ...

    def backward(
        self,
        raw: Tensor,
        transform: HeadTransform,
        labels: Tensor,
        floor: Tensor | None,
        logsumexp: Tensor,
        entropy: Tensor,
        grad_logprobs: Tensor | None,
        grad_entropy: Tensor | None,
    ) -> None:
        """Write the gradient of `raw` over it."""
        ...


@overridable
def chunked_logprobs(
    hidden: Tensor,  # [T, D]
    weight: Tensor,  # [V, D]
    labels: Tensor,  # [T] i64
    *,
    bias: Tensor | None = None,  # [V]
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    truncation: Truncation = UNTRUNCATED,
    chunk_size: int = 512,  # tokens
    with_entropy: bool = False,
    passes: LogitPasses | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute logprobs of `labels` and optionally entropy [nats]: [T] in float32, or float64 for float64 input.

    The product with the head runs in the dtype of its inputs, everything after it in float32 or higher. The gradient of
    the weight is summed over chunks in float32. passes: None runs torch's own operations.
    """
    transform = HeadTransform(logit_scale, softcap, temperature, truncation)
    return _apply(hidden, weight, bias, labels, transform, chunk_size, with_entropy, None, passes)


def vocab_parallel_logprobs(
    hidden: Tensor,  # [T, D], the same on every rank
    weight: DTensor,  # [V, D], sharded over V on one axis
    labels: Tensor,
    *,
    bias: DTensor | None = None,
    truncation: Truncation = UNTRUNCATED,
    chunk_size: int = 512,
    with_entropy: bool = False,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor | None]:
    """Compute `chunked_logprobs` without truncation for a head that is split over ranks. No logits are gathered.

    Collective over the axis of `weight`: each chunk sums over the ranks what `_ChunkedLogprobs` sums over columns. The
    result is bitwise equal on every rank.
    """
    assert weight.placements == (Shard(0),)
    assert not truncation, "which tokens are kept is not known to one rank"
    _, offset = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    own_bias, group = None if bias is None else bias.to_local(), weight.device_mesh.get_group()
    own_labels = labels - offset[0]  # negative or >= v if another rank has them
    transform = HeadTransform(logit_scale, softcap, temperature)
    return _apply(hidden, weight.to_local(), own_bias, own_labels, transform, chunk_size, with_entropy, group, None)


def _apply(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *options: Any
) -> tuple[Tensor, Tensor | None]:
    if bias is not None:  # -inf excludes a token, and 0 * inf would be nan in the entropy
        bias = bias.clamp(min=max(_EXCLUDED, torch.finfo(bias.dtype).min / 2))
    keeps = torch.is_grad_enabled()  # always False inside forward
    logprobs, entropy = _ChunkedLogprobs.apply(hidden, weight, bias, labels, *options, keeps)
    return logprobs, entropy if options[2] else None


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        transform: HeadTransform,
        chunk_size: int,
        with_entropy: bool,
        group: dist.ProcessGroup | None,  # ranks with the other columns
        passes: LogitPasses | None,
        keeps: bool,
    ) -> tuple[Tensor, Tensor]:
        num_tokens = hidden.shape[0]
        logprobs = hidden.new_empty(num_tokens, dtype=torch.promote_types(hidden.dtype, torch.float32))
        logsumexp = torch.empty_like(logprobs)
        floor = torch.empty_like(logprobs) if transform.truncation else None
        entropy = torch.zeros_like(logprobs) if not with_entropy else torch.empty_like(logprobs)
        buffer = hidden.new_empty(min(num_tokens, chunk_size), weight.shape[0])
        for chunk in _chunks(num_tokens, chunk_size):
            raw = product(hidden[chunk], weight, bias, out=buffer)
            if passes is not None:
                if floor is not None:
                    for rows, part in _blocks(raw, chunk):
                        z = passes.transformed(part, transform)
                        chosen = z.gather(1, labels[rows, None])[:, 0]
                        floor[rows] = torch.minimum(smallest_kept(z, transform.truncation), chosen)
                written = (logprobs, logsumexp, entropy if with_entropy else None)
                passes.forward(raw, transform, *_rows(chunk, labels, floor, *written))
                continue
            for rows, part in _blocks(raw, chunk) if group is None else [(chunk, raw)]:
                z = transformed(part, transform)
                own = _owned(labels[rows], weight, group)
                chosen = z.gather(1, (labels[rows] if own is None else labels[rows].where(own, 0))[:, None])[:, 0]
                if floor is not None:
                    floor[rows] = torch.minimum(smallest_kept(z, transform.truncation), chosen)
                    z.masked_fill_(z < floor[rows, None], _EXCLUDED)
                highest = z.amax(1)
                if group is not None:
                    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
                z.sub_(highest[:, None])
                weights = z.exp() if with_entropy else z.exp_()
                sums = [weights.sum(1), chosen, *([weights.mul_(z).sum(1)] if with_entropy else [])]
                if own is not None:
                    sums[1] = chosen.where(own, 0.0)
                    stacked = torch.stack(sums)
                    dist.all_reduce(stacked, group=group)
                    sums = list(stacked)
                lse = sums[0].log()
                logsumexp[rows] = lse + highest
                logprobs[rows] = sums[1] - highest - lse
                if with_entropy:
                    entropy[rows] = lse - sums[2] / sums[0]
        ctx.save_for_backward(hidden, weight, bias, labels, logsumexp, entropy, floor)
        ctx.transform, ctx.chunk_size, ctx.with_entropy = transform, chunk_size, with_entropy
        ctx.group, ctx.passes = group, passes
        ctx.kept = buffer if keeps else None  # raw logits of the last chunk
        ctx.set_materialize_grads(False)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, logsumexp, entropy, floor = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        given = grads if ctx.with_entropy else (grads[0], None)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=logsumexp.dtype) if needs_weight and not len(hidden) else None
        grad_bias = torch.zeros_like(bias, dtype=logsumexp.dtype) if needs_bias else None
        kept, ctx.kept = ctx.kept, None  # overwritten below: a second backward recomputes all logits
        buffer = hidden.new_empty(min(len(hidden), ctx.chunk_size), weight.shape[0]) if kept is None else kept
        for chunk in reversed(_chunks(hidden.shape[0], ctx.chunk_size)):
            raw = kept if kept is not None else product(hidden[chunk], weight, bias, out=buffer)
            kept = None
            if ctx.passes is not None:
                ctx.passes.backward(raw, ctx.transform, *_rows(chunk, labels, floor, logsumexp, entropy, *given))
                if grad_bias is not None:
                    grad_bias += raw.sum(0, dtype=grad_bias.dtype)
            for rows, part in _blocks(raw, chunk) if ctx.passes is None else ():
                of_rows = _rows(rows, labels, logsumexp, entropy, *given)
                own = _owned(labels[rows], weight, ctx.group)
                dz = grad_raw(part, ctx.transform, *of_rows, floor=None if floor is None else floor[rows], owned=own)
                if grad_bias is not None:
                    grad_bias += dz.sum(0)
                part.copy_(dz)
            if grad_hidden is not None:
                torch.mm(raw, weight, out=grad_hidden[chunk])
            if needs_weight:
                grad_weight = plus_product(grad_weight, raw, hidden[chunk], dtype=logsumexp.dtype)
        if grad_hidden is not None and ctx.group is not None:
            dist.all_reduce(grad_hidden, group=ctx.group)
        return (grad_hidden, grad_weight, grad_bias, *(None,) * 7)


def _rows(rows: slice, *tensors: Tensor | None) -> list[Any]:
    return [None if tensor is None else tensor[rows] for tensor in tensors]


def _owned(labels: Tensor, weight: Tensor, group: dist.ProcessGroup | None) -> Tensor | None:
    return None if group is None else (labels >= 0) & (labels < len(weight))


def _chunks(num_tokens: int, chunk_size: int) -> list[slice]:
    """Return the rows of each chunk. Only the first chunk may be short."""
    return [slice(max(0, end - chunk_size), end) for end in range(num_tokens, 0, -chunk_size)][::-1]


def _blocks(raw: Tensor, chunk: slice) -> Iterator[tuple[slice, Tensor]]:
    """Yield (rows among all tokens, logits [B, V] of the chunk `raw`) in blocks that fit in a cache."""
    if raw.device.type == "cpu" and type(raw) is Tensor:  # fake tensors come from the memory plan, which models devices
        size = torch.get_num_threads() * max(1, _PER_CORE // raw.shape[1])
    else:
        size = max(1, _PER_DEVICE // raw.shape[1])
    start = chunk.start
    for part in raw.split(size):
        yield slice(start, start + len(part)), part
        start += len(part)


def product(hidden: Tensor, weight: Tensor, bias: Tensor | None, *, out: Tensor) -> Tensor:
    """Compute the logits [C, V] of a chunk in the first rows of `out`."""
    out = out[: len(hidden)]
    if bias is None:
        return torch.mm(hidden, weight.T, out=out)
    return torch.addmm(bias, hidden, weight.T, out=out)


def transformed(raw: Tensor, transform: HeadTransform) -> Tensor:
    """Return a new tensor of `raw` after scale, cap and temperature, in float32 or higher."""
    exact = torch.promote_types(raw.dtype, torch.float32)
    if transform.softcap is None:
        return torch.mul(raw.to(exact), transform.logit_scale / transform.temperature)
    z = torch.mul(raw.to(exact), transform.logit_scale / transform.softcap)
    return z.tanh_().mul_(transform.softcap / transform.temperature)


def grad_raw(
    raw: Tensor,  # [C, V]
    transform: HeadTransform,
    labels: Tensor,  # [C]
    logsumexp: Tensor,  # [C]
    entropy: Tensor,  # [C]
    grad_logprobs: Tensor | None,  # [C]
    grad_entropy: Tensor | None,  # [C]
    *,
    floor: Tensor | None = None,  # [C]
    owned: Tensor | None = None,  # [C] bool, if only some labels are in these columns
) -> Tensor:
    """Compute the gradient of the raw logits [C, V], before scale, cap and temperature, in float32 or higher."""
    z = transformed(raw, transform)
    slope = _slope_of(z, transform)
    if floor is not None:
        z.masked_fill_(z < floor[:, None], _EXCLUDED)
    factor = 1.0 if isinstance(slope, Tensor) else slope  # scaling the row gradients is cheaper than scaling the logits
    of_logprobs, of_entropy = (None if grad is None else grad * factor for grad in (grad_logprobs, grad_entropy))
    dz = _grad_logits(z.sub_(logsumexp[:, None]), labels, of_logprobs, of_entropy, entropy, owned)
    return dz.mul_(slope) if isinstance(slope, Tensor) else dz


def _slope_of(z: Tensor, transform: HeadTransform) -> Tensor | float:
    """Compute dz / draw from z: with a softcap tanh' = 1 - tanh^2, and tanh = z * temperature / cap."""
    factor = transform.logit_scale / transform.temperature
    if transform.softcap is None:
        return factor
    return (z * (transform.temperature / transform.softcap)).square_().neg_().add_(1.0).mul_(factor)


def _grad_logits(
    logp: Tensor,  # [C, V] = z - logsumexp(z); overwritten
    labels: Tensor,  # [C]
    grad_logprobs: Tensor | None,  # [C]
    grad_entropy: Tensor | None,  # [C]
    entropy: Tensor,  # [C]
    owned: Tensor | None,
) -> Tensor:
    """Compute dz [C, V] (see the module docstring), reusing existing buffers."""
    if grad_entropy is None:
        dz = logp.exp_()
        if grad_logprobs is None:
            return dz.zero_()
        dz.mul_(-grad_logprobs[:, None])
    else:
        p = logp.exp()
        dz = logp.add_(entropy[:, None]).mul_(-grad_entropy[:, None])
        if grad_logprobs is not None:
            dz.sub_(grad_logprobs[:, None])
        dz.mul_(p)
    if grad_logprobs is not None:
        rows = torch.arange(len(labels), device=labels.device)
        if owned is not None:
            labels, grad_logprobs = labels.where(owned, 0), grad_logprobs.where(owned, 0.0)
        dz.index_put_((rows, labels), grad_logprobs, accumulate=True)  # scatter_add_ is not deterministic on CUDA
    return dz


def plus_product(total: Tensor | None, dz: Tensor, hidden: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Add dz.T @ hidden to `total` [V, D] in place, in `dtype`. None: start a new sum.

    On CUDA, the product of half precision is summed in float32 without being rounded between.
    """
    if dz.device.type == "cuda" and dz.dtype != dtype == torch.float32:
        if total is None:
            return torch.mm(dz.T, hidden, out_dtype=dtype)
        return torch.addmm(total, dz.T, hidden, out_dtype=dtype, out=total)
    if total is None:
        return (dz.T @ hidden).to(dtype)
    if dtype == hidden.dtype:
        return total.addmm_(dz.T, hidden)
    return total.add_(dz.T @ hidden)
