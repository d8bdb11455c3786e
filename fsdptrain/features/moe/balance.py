"""The load-balancing loss of a mixture of experts, over a whole optimizer step.

    loss = mean over layers l of  E sum_e f_le P_le
    f_le   choices of expert e / tokens: sums to k over e; a constant, as in every implementation
    P_le   mean over tokens of softmax(router logits)

The means are over all tokens, prompts included, of the sequences that have a loss in this step, on every rank; never
over padding. With `--router-replay` f counts the replayed choices. The loss is k when balanced, and at most E.

The loss is multiplied by the coefficient and added to the loss of the step; `config` uses router_aux_loss_coef of the
model's config. Metrics: moe/aux_loss is the loss before the coefficient, moe/load_max the load of the most loaded
expert (1: balanced), moe/dead_experts the fraction of experts that no token chose.

It is the loss of the Switch Transformer (arXiv 2101.03961, equations 4 to 6, with top-k choices), and transformers'
`load_balancing_loss_func` on the step as one batch, layer by layer. It differs from the training code of transformers
in two ways:

- f and P are those of the whole step, not of one micro-batch, so packing and the number of ranks change nothing, and
  experts may specialize by sequence (arXiv 2501.11873). f is known before the first gradient, so the loss is a sum over
  tokens.
- f and P are not averaged over layers before they are multiplied. With that average, an expert that one layer
  overloads would compensate for the expert of the same index that another layer starves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from fsdptrain.types import NO_ROUTE, LossOutput, Metrics, PackedBatch


@dataclass(frozen=True)
class ExpertLoad:
    """Load of each expert in an optimizer step, over all ranks. L: layers with experts."""

    choices: Tensor  # [L, E] f32, f_le
    num_tokens: int  # number of counted tokens, at least 1
    top_k: int

    @classmethod
    def of(cls, counts: Tensor, *, num_tokens: int, top_k: int) -> Self | None:
        """Compute the load from `counts` [layers, E] of the whole step. None if there are no choices."""
        counts = counts[counts.sum(1) > 0].double()  # drop layers without experts
        if not len(counts):
            return None
        return cls((top_k * counts / counts.sum(1, keepdim=True)).float(), max(1, num_tokens), top_k)

    def metrics(self) -> Metrics:
        """Return moe/load_max (most loaded expert of any layer, 1: balanced) and moe/dead_experts (a fraction)."""
        share = self.choices * self.choices.shape[1] / self.top_k
        return {"moe/load_max": share.max().item(), "moe/dead_experts": (share == 0).float().mean().item()}


def balance_loss(router_logits: Sequence[Tensor], counted: Tensor, load: ExpertLoad) -> Tensor:
    """Compute this pack's part of the loss, []. The parts of all packs and ranks sum to the loss.

    Args:
        router_logits: [T, E] of each layer with experts.
        counted: [T] bool, `trained_tokens` of the pack.
    """
    weights = counted.float() / load.num_tokens
    choices = load.choices.to(counted.device)
    parts = [weights @ logits.float().softmax(-1) @ f for logits, f in zip(router_logits, choices, strict=True)]
    return torch.stack(parts).mean() * choices.shape[1]


def count_choices(routes: Tensor, counted: Tensor, num_experts: int) -> Tensor:
    """Count how often the counted tokens choose each expert: [layers, E] i64.

    routes: [T, layers, k], with NO_ROUTE.
    """
    layers = routes.shape[1]
    experts = routes.long() + num_experts * torch.arange(layers, device=routes.device)[:, None]
    chosen = (routes != NO_ROUTE) & counted[:, None, None]
    counts = torch.zeros(layers * num_experts, dtype=torch.int64, device=routes.device)
    counts.index_add_(0, experts.clamp(min=0).flatten(), chosen.flatten().long())
    return counts.view(layers, num_experts)


def trained_tokens(batch: PackedBatch) -> Tensor:
    """Return [T] bool: tokens of sequences with a loss. Excludes filler packs and samples without a loss."""
    sequence = torch.searchsorted(
        batch.cu_seqlens[1:],
        torch.arange(batch.num_tokens, device=batch.cu_seqlens.device, dtype=torch.int32),
        right=True,
    )
    losses = torch.zeros(len(batch.seqlens), device=sequence.device).index_add(0, sequence, batch.loss_mask.float())
    return losses[sequence] > 0


def add_router_loss(output: LossOutput, router_loss: Tensor, coef: float) -> LossOutput:
    """Return `output` plus coef * router_loss. Metrics: moe/aux_loss is the loss, loss/router the added term."""
    added = coef * router_loss
    metrics = {**output.metrics, "loss/router": added.detach(), "moe/aux_loss": router_loss.detach()}
    if "loss/total" in metrics:  # a custom loss may not report it
        metrics["loss/total"] = metrics["loss/total"] + added.detach()
    return LossOutput(output.loss + added, metrics)
