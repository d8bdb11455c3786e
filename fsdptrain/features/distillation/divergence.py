"""Divergences of next-token distributions, computed from hidden states in chunks of tokens.

Only one chunk of tokens has logits at a time, for policy and teacher. The backward pass
computes them again; autograd differentiates the divergence of a chunk.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdptrain.model.logit_passes import EXCLUDED, HeadTransform, transformed
from fsdptrain.model.logprobs import plus_product, product


def generalized_jsd(policy: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Return the generalized Jensen-Shannon divergence of two distributions, from logprobs [..., V]. [...] [nats]

    beta KL(teacher || m) + (1 - beta) KL(policy || m), m = beta teacher + (1 - beta) policy (GKD, arXiv 2306.13649).
    0 and 1 are the forward KL(teacher || policy) and the reverse KL(policy || teacher), the limits of the divergence
    divided by beta and by 1 - beta.
    """
    if beta == 0:
        return _kl(teacher, policy)
    if beta == 1:
        return _kl(policy, teacher)
    mixture = torch.logaddexp(teacher + math.log(beta), policy + math.log1p(-beta))
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(policy, mixture)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)


@dataclass(frozen=True)
class Head:
    """The last layer of a model."""

    weight: Tensor  # [V, D]
    bias: Tensor | None
    transform: HeadTransform

    def logits(self, hidden: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return the logits [C, V] of `hidden` [C, D] as the softmax takes them, in float32 or higher."""
        out = hidden.new_empty(len(hidden), len(self.weight)) if out is None else out
        return transformed(product(hidden, self.weight, self.bias, out=out), self.transform)


@dataclass(frozen=True)
class TopTokens:
    """The teacher's k most likely tokens of M positions, and all others as one outcome.

    Their divergence is a lower bound of the divergence over the whole vocabulary.
    """

    ids: Tensor  # [M, k] i64
    logprobs: Tensor  # [M, k + 1] f32; last: of all other tokens
    beta: float

    def divergence(self, logits: Tensor, rows: slice) -> Tensor:
        """Return the divergence [C] to the policy's `logits` [C, V] (after the transform) of the tokens `rows`."""
        ids = self.ids[rows]
        return generalized_jsd(with_rest(logits, ids), self.logprobs[rows].to(logits.dtype), self.beta)


def with_rest(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the logprobs of the tokens `ids` [C, k], then the logprob of all other tokens together: [C, k + 1]."""
    chosen, total = logits.gather(1, ids), logits.logsumexp(1, keepdim=True)
    rest = logits.scatter(1, ids, EXCLUDED).logsumexp(1, keepdim=True)
    return torch.cat([chosen, rest], dim=1) - total


@torch.no_grad()
def top_tokens(hidden: Tensor, head: Head, k: int, *, vocab_size: int, chunk_size: int) -> tuple[Tensor, Tensor]:
    """Return `TopTokens.ids` and `TopTokens.logprobs` of `hidden` [M, D], among the first `vocab_size` tokens."""
    ids, logprobs = [], []
    for part in hidden.split(chunk_size):
        logits = head.logits(part)[:, :vocab_size]
        ids.append(logits.topk(min(k, logits.shape[1]), dim=1).indices)
        logprobs.append(with_rest(logits, ids[-1]))
    return torch.cat(ids), torch.cat(logprobs)


def chunked_divergence(hidden: Tensor, head: Head, target: TopTokens, *, chunk_size: int) -> Tensor:
    """Return the divergence of each of M tokens, from the policy's `hidden` [M, D]. [M], float32 or higher"""
    return _Divergence.apply(hidden, head.weight, head.bias, head.transform, target, chunk_size)


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        transform: HeadTransform,
        target: TopTokens,
        chunk_size: int,
    ) -> Tensor:
        head = Head(weight, bias, transform)
        buffer = hidden.new_empty(min(len(hidden), chunk_size), len(weight))
        parts = [
            target.divergence(head.logits(hidden[rows], out=buffer), rows) for rows in _chunks(len(hidden), chunk_size)
        ]
        ctx.save_for_backward(hidden, weight, bias)
        ctx.options = transform, target, chunk_size
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore  # one output
        hidden, weight, bias = ctx.saved_tensors
        transform, target, chunk_size = ctx.options
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight: Tensor | None = None
        grad_bias = torch.zeros_like(bias, dtype=grad.dtype) if needs_bias else None
        buffer = hidden.new_empty(min(len(hidden), chunk_size), len(weight))
        for rows in _chunks(len(hidden), chunk_size):
            raw = product(hidden[rows], weight, bias, out=buffer)
            with torch.enable_grad():
                leaf = raw.detach().to(grad.dtype, copy=True).requires_grad_()
                values = target.divergence(_transformed(leaf, transform), rows)
            (exact,) = torch.autograd.grad(values, leaf, grad[rows])
            if grad_bias is not None:
                grad_bias += exact.sum(0)
            dz = raw.copy_(exact)
            if grad_hidden is not None:
                torch.mm(dz, weight, out=grad_hidden[rows])
            if needs_weight:
                grad_weight = plus_product(grad_weight, dz, hidden[rows], dtype=grad.dtype)
        return (grad_hidden, grad_weight, grad_bias, *(None,) * 3)


def _transformed(raw: Tensor, transform: HeadTransform) -> Tensor:
    """Return `logit_passes.transformed` without changing anything in place, for autograd."""
    if transform.softcap is None:
        return raw * (transform.logit_scale / transform.temperature)
    return (raw * (transform.logit_scale / transform.softcap)).tanh() * (transform.softcap / transform.temperature)


def _chunks(num_tokens: int, chunk_size: int) -> list[slice]:
    return [slice(start, start + chunk_size) for start in range(0, num_tokens, chunk_size)]
