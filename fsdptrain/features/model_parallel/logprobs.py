"""`chunked_logprobs` for a head split over ranks along the vocabulary. No logits are gathered.

With z the logits of this rank's part and m their maximum over all ranks, each chunk of tokens sums over the ranks

    sum exp(z - m),  sum exp(z - m) * z,  z[label] on the rank that has it

These give logsumexp, logprob and entropy, bitwise equal on every rank. The gradient of the logits needs no
communication. That of the hidden states is summed over ranks once.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fsdptrain.model.logprobs import HeadTransform, grad_raw, plus_product, product, transformed
from fsdptrain.model.truncation import UNTRUNCATED, Truncation


def vocab_parallel_logprobs(
    hidden: Tensor,  # [T, D], the same on every rank
    weight: DTensor,  # [V, D], sharded over V on one axis
    labels: Tensor,  # [T] i64
    *,
    bias: DTensor | None = None,  # [V], sharded like `weight`
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    truncation: Truncation = UNTRUNCATED,
    chunk_size: int = 512,  # tokens
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute `chunked_logprobs` without truncation. Collective over the axis of `weight`."""
    assert weight.placements == (Shard(0),)
    assert not truncation, "which tokens are kept is not known to one rank"
    transform = HeadTransform(logit_scale, softcap, temperature)
    _, offset = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    own_bias = None if bias is None else bias.to_local()
    group = weight.device_mesh.get_group()
    logprobs, entropy = _SplitLogprobs.apply(
        hidden, weight.to_local(), own_bias, labels - offset[0], transform, chunk_size, with_entropy, group
    )
    return logprobs, entropy if with_entropy else None


class _SplitLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,  # [v, D]
        bias: Tensor | None,  # [v]
        labels: Tensor,  # [T], relative to the first row of this rank; negative or >= v if another rank has it
        transform: HeadTransform,
        chunk_size: int,
        with_entropy: bool,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = torch.empty(hidden.shape[0], dtype=exact, device=hidden.device)
        logsumexp = torch.empty_like(logprobs)
        entropy = torch.zeros_like(logprobs)
        buffer = hidden.new_empty(min(len(hidden), chunk_size), weight.shape[0])
        for start in range(0, len(hidden), chunk_size):
            rows = slice(start, start + chunk_size)
            z = transformed(product(hidden[rows], weight, bias, out=buffer), transform)
            highest = z.amax(1)
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
            own = _owned(labels[rows], weight)
            chosen = z.gather(1, labels[rows].where(own, 0)[:, None])[:, 0].where(own, 0.0)
            weights = (z - highest[:, None]).exp_()
            parts = [weights.sum(1), chosen, *([weights.mul_(z).sum(1)] if with_entropy else [])]
            sums = torch.stack(parts)
            dist.all_reduce(sums, group=group)
            logsumexp[rows] = lse = sums[0].log() + highest
            logprobs[rows] = sums[1] - lse
            if with_entropy:
                entropy[rows] = lse - sums[2] / sums[0]
        ctx.save_for_backward(hidden, weight, bias, labels, logsumexp, entropy)
        ctx.transform, ctx.chunk_size, ctx.with_entropy, ctx.group = transform, chunk_size, with_entropy, group
        ctx.set_materialize_grads(False)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, logsumexp, entropy = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        given = grads if ctx.with_entropy else (grads[0], None)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=logsumexp.dtype) if needs_weight and not len(hidden) else None
        grad_bias = torch.zeros_like(bias, dtype=logsumexp.dtype) if needs_bias else None
        buffer = hidden.new_empty(min(len(hidden), ctx.chunk_size), weight.shape[0])
        for start in range(0, len(hidden), ctx.chunk_size):
            rows = slice(start, start + ctx.chunk_size)
            raw = product(hidden[rows], weight, bias, out=buffer)
            of_rows: list[Any] = [None if x is None else x[rows] for x in (labels, logsumexp, entropy, *given)]
            dz = grad_raw(raw, ctx.transform, *of_rows, owned=_owned(labels[rows], weight))
            if grad_bias is not None:
                grad_bias += dz.sum(0)
            raw.copy_(dz)
            if grad_hidden is not None:
                torch.mm(raw, weight, out=grad_hidden[rows])
            if needs_weight:
                grad_weight = plus_product(grad_weight, raw, hidden[rows], dtype=logsumexp.dtype)
        if grad_hidden is not None:
            dist.all_reduce(grad_hidden, group=ctx.group)
        return (grad_hidden, grad_weight, grad_bias, None, None, None, None, None)


def _owned(labels: Tensor, weight: Tensor) -> Tensor:
    return (labels >= 0) & (labels < len(weight))
