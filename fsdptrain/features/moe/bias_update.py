"""Balancing experts by the bias of their router, from the load of an optimizer step over every rank."""

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from fsdptrain.features.moe.balance import ExpertLoad, bias_change, count_choices, trained_tokens
from fsdptrain.features.moe.bias import choice_biases
from fsdptrain.model.structure import decoder_layers, expert_choice
from fsdptrain.types import Metrics, PackedBatch


class RouterBiasUpdater:
    """After an optimizer step the bias of an expert goes up by the rate if it had less than the mean load of the step,
    and down if it had more. The bias is added to the scores before experts are chosen, and to nothing else.

    The load are the choices of all tokens of sequences with a loss, on every rank, as they were made in the forward
    pass (replayed ones too), and no recomputation. Ranks of a tensor or context group all count their packs, and shares
    stay what they are. Counts are integers, so all ranks move their copy of a bias by the same. Where the optimizer
    skips a step the bias stays too.
    """

    def __init__(self, model: PreTrainedModel, *, rate: float) -> None:
        choice = expert_choice(model.config)
        assert choice is not None, "check_bias has asked"
        self._rate, self._top_k = rate, choice.top_k
        self._biases = choice_biases(model)
        device = next(iter(self._biases.values())).device
        self._counts = torch.zeros(len(decoder_layers(model)), choice.num_experts, dtype=torch.int64, device=device)

    def count(self, routes: Tensor | None, batch: PackedBatch) -> None:
        """The experts `routes` [T, layers, k] that the tokens of `batch` took. Does not wait for the device."""
        assert routes is not None, "they were asked for"
        self._counts += count_choices(routes, trained_tokens(batch), self._counts.shape[1])

    def finish(self, *, move: bool) -> Metrics:
        """Move the biases, or, where the optimizer skips its step, leave them too. The load of the step.

        Collective, and it waits for the device.
        """
        dist.all_reduce(self._counts)
        if move:
            for index, bias in self._biases.items():
                bias.add_(bias_change(self._counts[index]).view_as(bias), alpha=self._rate)
        load = ExpertLoad.of(self._counts.cpu(), num_tokens=1, top_k=self._top_k)
        return load.metrics() if load else {}
