"""The load-balancing loss of a mixture of experts, over a whole optimizer step.

    loss = mean over layers l of  E sum_e f_le P_le
    f_le   choices of expert e / tokens: sums to k over e; a constant, as in every implementation
    P_le   mean over tokens of softmax(router logits)

over all tokens, prompts too, of the sequences that have a loss in this step, on every rank; never over padding. With
`--router-replay` f counts the replayed choices. It is k where all is balanced, and at most E.

Times the coefficient it is added to the loss of the step; `config` takes router_aux_loss_coef of the model's config.
moe/aux_loss is the loss itself, moe/load_max the load of the most loaded expert (1: balanced), moe/dead_experts the
share of experts that nobody chose.

It is the loss of the Switch Transformer (arXiv 2101.03961, equations 4 to 6, with top-k choices), and transformers'
`load_balancing_loss_func` on the step as one batch, layer by layer. Two things differ from what transformers does with
it in training, both on purpose:

- f and P are those of the whole step, not of one micro-batch, so packs and ranks change nothing, and experts may differ
  between sequences (arXiv 2501.11873). f is known before the first gradient: then the loss is a sum over tokens.
- f and P are not averaged over layers before they are multiplied: there an expert that one layer overloads makes up for
  the expert of the same number that another layer starves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from fsdptrain.types import NO_ROUTE, LossOutput, Metrics, PackedBatch


@dataclass(frozen=True)
class ExpertLoad:
    """How often each expert is chosen in an optimizer step, over every rank. L: layers with experts."""

    choices: Tensor  # [L, E] f32, f_le
    num_tokens: int  # that count, at least 1
    top_k: int

    @classmethod
    def of(cls, counts: Tensor, *, num_tokens: int, top_k: int) -> Self | None:
        """From `counts` [layers, E] of the whole step. None where nothing was chosen at all."""
        counts = counts[counts.sum(1) > 0].double()  # layers without experts choose nothing
        if not len(counts):
            return None
        return cls((top_k * counts / counts.sum(1, keepdim=True)).float(), max(1, num_tokens), top_k)

    def metrics(self) -> Metrics:
        """moe/load_max: of the most loaded expert of any layer, 1 where all is balanced. moe/dead_experts: a share."""
        share = self.choices * self.choices.shape[1] / self.top_k
        return {"moe/load_max": share.max().item(), "moe/dead_experts": (share == 0).float().mean().item()}


def balance_loss(router_logits: Sequence[Tensor], counted: Tensor, load: ExpertLoad) -> Tensor:
    """This pack's part of the loss: a sum, whose parts over packs and ranks add up. []

    Args:
        router_logits: [T, E] of each layer with experts.
        counted: [T] bool, `trained_tokens` of the pack.
    """
    weights = counted.float() / load.num_tokens
    choices = load.choices.to(counted.device)
    parts = [weights @ logits.float().softmax(-1) @ f for logits, f in zip(router_logits, choices, strict=True)]
    return torch.stack(parts).mean() * choices.shape[1]


def bias_change(counts: Tensor) -> Tensor:
    """-1, 0 or 1 for each expert, [..., E] from its `counts` i64 of a whole step: the direction of its router's bias.

    sign(mean count - own count), so an expert with less than its share is chosen more often from now on. By integers,
    so exact. Auxiliary-loss-free balancing, arXiv 2408.15664, algorithm 1; DeepSeek-V3, arXiv 2412.19437, 2.1.2, whose
    bias update speed is 0.001.
    """
    return (counts.sum(-1, keepdim=True) - counts.shape[-1] * counts).sign()


def count_choices(routes: Tensor, counted: Tensor, num_experts: int) -> Tensor:
    """[layers, E] i64: how often the counted tokens choose each expert. `routes` is [T, layers, k], with NO_ROUTE."""
    layers = routes.shape[1]
    experts = routes.long() + num_experts * torch.arange(layers, device=routes.device)[:, None]
    chosen = (routes != NO_ROUTE) & counted[:, None, None]
    counts = torch.zeros(layers * num_experts, dtype=torch.int64, device=routes.device)
    counts.index_add_(0, experts.clamp(min=0).flatten(), chosen.flatten().long())
    return counts.view(layers, num_experts)


def trained_tokens(batch: PackedBatch) -> Tensor:
    """[T] bool: tokens of sequences that have a loss. Neither a pack that only fills, nor a sample without loss."""
    sequence = torch.searchsorted(
        batch.cu_seqlens[1:],
        torch.arange(batch.num_tokens, device=batch.cu_seqlens.device, dtype=torch.int32),
        right=True,
    )
    losses = torch.zeros(len(batch.seqlens), device=sequence.device).index_add(0, sequence, batch.loss_mask.float())
    return losses[sequence] > 0


def add_router_loss(output: LossOutput, router_loss: Tensor, coef: float) -> LossOutput:
    """`output` plus coef * router_loss. moe/aux_loss is the loss itself, loss/router what it adds."""
    added = coef * router_loss
    metrics = {**output.metrics, "loss/router": added.detach(), "moe/aux_loss": router_loss.detach()}
    if "loss/total" in metrics:  # a loss of one's own may not name it
        metrics["loss/total"] = metrics["loss/total"] + added.detach()
    return LossOutput(output.loss + added, metrics)
