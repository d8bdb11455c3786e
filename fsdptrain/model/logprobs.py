"""Compute logprobs and entropy from hidden states in chunks, with the logits of one chunk in memory.

    raw = hidden @ weight.T + bias          the head
    z = cap(scale * raw) / temperature      the model's logit transform, then the rollout temperature
    K = tokens with z >= floor              tokens kept by truncated sampling, and the label; without truncation all
    logprob = z[label] - logsumexp_K(z)
    entropy = logsumexp_K(z) - sum_K(softmax_K(z) * z)

The backward pass recomputes the logits chunk by chunk. With p = softmax_K(z), which is 0 outside K, and the gradients g
of logprob and h of entropy:

    dz = g * (onehot(label) - p) - h * p * (z - logsumexp_K(z) + entropy)

The products with the head run over chunks of tokens, through one buffer of chunk_size x V in the dtype of `hidden`. The
operations between them are in `logit_passes`.

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

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdptrain.model.logit_passes import EXCLUDED, HeadTransform, LogitRows, RowGrads, backward_rows, forward_rows
from fsdptrain.types import UNTRUNCATED, Truncation


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
    group: dist.ProcessGroup | None = None,  # the ranks that have the other columns of the logits
) -> tuple[Tensor, Tensor | None]:
    """Compute logprobs of `labels` and optionally entropy [nats]: [T] in float32, or float64 for float64 input.

    The product with the head runs in the dtype of its inputs, everything after it in float32 or higher. The gradient of
    the weight is summed over chunks in float32.
    """
    transform = HeadTransform(logit_scale, softcap, temperature, truncation)
    options = _Options(transform, chunk_size, with_entropy, group)
    if bias is not None:  # -inf excludes a token, and 0 * inf would be nan in the entropy
        bias = bias.clamp(min=max(EXCLUDED, torch.finfo(bias.dtype).min / 2))
    keeps = torch.is_grad_enabled()  # always False inside forward
    logprobs, entropy = _ChunkedLogprobs.apply(hidden, weight, bias, labels, options, keeps)
    return logprobs, entropy if with_entropy else None


@dataclass(frozen=True)
class _Options:
    transform: HeadTransform
    chunk_size: int
    with_entropy: bool
    group: dist.ProcessGroup | None


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, options: _Options, keeps: bool
    ) -> tuple[Tensor, Tensor]:
        num_tokens, transform = hidden.shape[0], options.transform
        logprobs = hidden.new_empty(num_tokens, dtype=torch.promote_types(hidden.dtype, torch.float32))
        logsumexp = torch.empty_like(logprobs)
        floor = torch.empty_like(logprobs) if transform.truncation else None
        entropy = torch.empty_like(logprobs) if options.with_entropy else torch.zeros_like(logprobs)
        rows = LogitRows(labels, logsumexp, entropy if options.with_entropy else None, floor)
        buffer = hidden.new_empty(min(num_tokens, options.chunk_size), weight.shape[0])
        for chunk in _chunks(num_tokens, options.chunk_size):
            raw = product(hidden[chunk], weight, bias, out=buffer)
            forward_rows(raw, rows[chunk], transform, logprobs[chunk], options.group)
        ctx.save_for_backward(hidden, weight, bias, labels, logsumexp, entropy, floor)
        ctx.options = options
        ctx.kept = buffer if keeps else None  # raw logits of the last chunk
        ctx.set_materialize_grads(False)
        if not options.with_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, logsumexp, entropy, floor = ctx.saved_tensors
        options: _Options = ctx.options
        rows = LogitRows(labels, logsumexp, entropy, floor)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        of_rows = RowGrads(grads[0], grads[1] if options.with_entropy else None)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=logsumexp.dtype) if needs_weight and not len(hidden) else None
        grad_bias = torch.zeros_like(bias, dtype=logsumexp.dtype) if needs_bias else None
        kept, ctx.kept = ctx.kept, None  # overwritten below: a second backward recomputes all logits
        buffer = hidden.new_empty(min(len(hidden), options.chunk_size), weight.shape[0]) if kept is None else kept
        for chunk in reversed(_chunks(hidden.shape[0], options.chunk_size)):
            raw = kept if kept is not None else product(hidden[chunk], weight, bias, out=buffer)
            kept = None
            backward_rows(raw, rows[chunk], options.transform, of_rows[chunk], grad_bias, options.group)
            if grad_hidden is not None:
                torch.mm(raw, weight, out=grad_hidden[chunk])
            if needs_weight:
                grad_weight = plus_product(grad_weight, raw, hidden[chunk], dtype=logsumexp.dtype)
        if grad_hidden is not None and options.group is not None:
            dist.all_reduce(grad_hidden, group=options.group)
        return (grad_hidden, grad_weight, grad_bias, *(None,) * 3)


def _chunks(num_tokens: int, chunk_size: int) -> list[slice]:
    """Return the rows of each chunk. Only the first chunk may be short."""
    return [slice(max(0, end - chunk_size), end) for end in range(num_tokens, 0, -chunk_size)][::-1]


def product(hidden: Tensor, weight: Tensor, bias: Tensor | None, *, out: Tensor) -> Tensor:
    """Compute the logits [C, V] of a chunk in the first rows of `out`."""
    out = out[: len(hidden)]
    if bias is None:
        return torch.mm(hidden, weight.T, out=out)
    return torch.addmm(bias, hidden, weight.T, out=out)


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
