"""Log-probabilities and entropy from hidden states, in chunks of tokens: neither [T, V] nor its gradient exists whole.

    raw = hidden @ weight.T + bias          the head
    z = cap(scale * raw) / temperature      what the model does to its logits, then the temperature of the rollout
    K = tokens with z >= floor              what truncated sampling left, and the label; without truncation all
    logprob = z[label] - logsumexp_K(z)
    entropy = logsumexp_K(z) - sum_K(softmax_K(z) * z)

The backward makes the logits again, chunk by chunk. With p = softmax_K(z), 0 outside of K, and gradients g of logprob
and h of entropy:
    dz = g * (onehot(label) - p) - h * p * (z - logsumexp_K(z) + entropy)
A chunk holds two float32 buffers of chunk_size x V at a time (three with a softcap; truncation adds what its sort
takes). A token costs four products with the head: one forward; backward one again, and one for each of the two
gradients.

K is made from the logits of the present policy. So that the sampled token is in it, whatever rounding or an optimizer
step did to the logits, it reaches down to the label: the smallest head of the distribution that passes the filters and
holds the label. Then a logprob is finite, and 0 at most. (prime-rl and, by a flag, vLLM record the engine's set itself,
as DeepSeek-V3.2 does, arXiv 2512.02556 "keep sampling mask": exact also far off-policy, for V bits a token.)
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdptrain.models.truncation import UNTRUNCATED, Truncation, smallest_kept
from fsdptrain.overrides import overridable

# For logits outside of K: no softmax sees them, and times a probability of 0 they are 0, where -inf would be NaN.
_EXCLUDED = -1e30


@dataclass(frozen=True)
class HeadTransform:
    """What is done to `hidden @ weight.T + bias` before the softmax."""

    logit_scale: float = 1.0  # first: multiplies (granite divides by its logits_scaling: its inverse)
    softcap: float | None = None  # then: cap * tanh(logits / cap)
    temperature: float = 1.0  # then: divides
    truncation: Truncation = UNTRUNCATED  # last


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
    chunk_size: int = 1024,  # tokens
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of `labels` and, where asked for, entropy in nats: [T] in float32, or float64 for float64 input.

    The product with the head runs in the dtype of its inputs, everything after it in float32 or more; the gradient of
    the weight is summed over chunks in float32.
    """
    transform = HeadTransform(logit_scale, softcap, temperature, truncation)
    logprobs, entropy = _ChunkedLogprobs.apply(hidden, weight, bias, labels, transform, chunk_size, with_entropy)
    return logprobs, entropy if with_entropy else None


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
    ) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(hidden.dtype, torch.float32)
        num_tokens = hidden.shape[0]
        logprobs = torch.empty(num_tokens, dtype=exact, device=hidden.device)
        logsumexp = torch.empty_like(logprobs)
        floor = torch.empty_like(logprobs) if transform.truncation else None
        entropy = torch.zeros_like(logprobs) if not with_entropy else torch.empty_like(logprobs)
        for start in range(0, num_tokens, chunk_size):
            rows = slice(start, start + chunk_size)
            z = logits_of(hidden[rows], weight, bias, transform)
            chosen = z.gather(1, labels[rows, None])[:, 0]
            if floor is not None:
                floor[rows] = torch.minimum(smallest_kept(z, transform.truncation), chosen)
                z.masked_fill_(z < floor[rows, None], _EXCLUDED)
            highest = z.amax(1)
            z.sub_(highest[:, None])
            weights = z.exp() if with_entropy else z.exp_()
            total = weights.sum(1)
            lse = total.log()
            logsumexp[rows] = lse + highest
            logprobs[rows] = chosen - highest - lse
            if with_entropy:
                entropy[rows] = lse - weights.mul_(z).sum(1) / total
        ctx.save_for_backward(hidden, weight, bias, labels, logsumexp, entropy, floor)
        ctx.transform, ctx.chunk_size, ctx.with_entropy = transform, chunk_size, with_entropy
        ctx.set_materialize_grads(False)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, logsumexp, entropy, floor = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_logprobs, grad_entropy = grads
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=logsumexp.dtype) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=logsumexp.dtype) if needs_bias else None
        for start in range(0, hidden.shape[0], ctx.chunk_size):
            rows = slice(start, start + ctx.chunk_size)
            z = logits_of(hidden[rows], weight, bias, ctx.transform)
            slope = slope_of(z, ctx.transform)
            if floor is not None:
                z.masked_fill_(z < floor[rows, None], _EXCLUDED)
            factor = 1.0 if isinstance(slope, Tensor) else slope  # of a row costs less than of its logits
            dz = _grad_logits(
                z.sub_(logsumexp[rows, None]),
                labels[rows],
                None if grad_logprobs is None else grad_logprobs[rows] * factor,
                None if grad_entropy is None or not ctx.with_entropy else grad_entropy[rows] * factor,
                entropy[rows],
            )
            if isinstance(slope, Tensor):
                dz.mul_(slope)
            if grad_bias is not None:
                grad_bias += dz.sum(0)
            dz = dz.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(dz, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                add_product(grad_weight, dz, hidden[rows])
        return (grad_hidden, grad_weight, grad_bias, None, None, None, None)


def logits_of(hidden: Tensor, weight: Tensor, bias: Tensor | None, transform: HeadTransform) -> Tensor:
    """[C, V] in float32 or more, after scale, cap and temperature."""
    raw = hidden @ weight.T if bias is None else torch.addmm(bias, hidden, weight.T)
    z = raw.to(torch.promote_types(raw.dtype, torch.float32))
    if transform.softcap is not None:
        return z.mul_(transform.logit_scale / transform.softcap).tanh_().mul_(transform.softcap / transform.temperature)
    factor = transform.logit_scale / transform.temperature
    return z if factor == 1.0 else z.mul_(factor)


def slope_of(z: Tensor, transform: HeadTransform) -> Tensor | float:
    """dz / draw, from z itself: with a softcap tanh' = 1 - tanh^2, and tanh = z * temperature / cap."""
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
) -> Tensor:
    """dz [C, V] of this module's docstring, in the buffers that are there."""
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
        dz.index_put_((rows, labels), grad_logprobs, accumulate=True)  # scatter_add_ is not deterministic on CUDA
    return dz


def add_product(total: Tensor, dz: Tensor, hidden: Tensor) -> None:
    """total [V, D] += dz.T @ hidden, summed over chunks in the dtype of `total`."""
    if total.dtype == hidden.dtype:
        total.addmm_(dz.T, hidden)
    else:
        total.add_(dz.T @ hidden)
