"""Balance experts by updating the router bias from the load of an optimizer step over all ranks."""

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from fsdptrain.features.moe.balance import ExpertLoad, bias_change, count_choices, trained_tokens
from fsdptrain.features.moe.bias import choice_biases
from fsdptrain.model.structure import decoder_layers, expert_choice
from fsdptrain.types import Metrics, PackedBatch


class RouterBiasUpdater:
    """Accumulates expert counts during an optimizer step and updates the router biases after it.

    An expert's bias increases by the rate if its load is below the mean of the step, and decreases if it is above. The
    bias is added to the scores before experts are chosen, and nowhere else.

    The load counts the choices of all tokens of sequences with a loss, on every rank, as made in the forward pass
    (replayed ones included), without recomputation. All ranks of a tensor or context group count their packs, which
    leaves relative loads unchanged. Counts are integers, so all ranks update their copy of a bias equally. If the
    optimizer skips a step, the bias is not updated.
    """

    def __init__(self, model: PreTrainedModel, *, rate: float) -> None:
        choice = expert_choice(model.config)
        assert choice is not None, "check_bias has asked"
        self._rate, self._top_k = rate, choice.top_k
        self._biases = choice_biases(model)
        device = next(iter(self._biases.values())).device
        self._counts = torch.zeros(len(decoder_layers(model)), choice.num_experts, dtype=torch.int64, device=device)

    def count(self, routes: Tensor | None, batch: PackedBatch) -> None:
        """Count the experts `routes` [T, layers, k] of the tokens of `batch`. Does not wait for the device."""
        assert routes is not None, "they were asked for"
        self._counts += count_choices(routes, trained_tokens(batch), self._counts.shape[1])

    def step(self, *, apply: bool) -> Metrics:
        """Update the biases, unless the optimizer skips its step. Returns the load of the step.

        Collective. Waits for the device.
        """
        dist.all_reduce(self._counts)
        if apply:
            for index, bias in self._biases.items():
                bias.add_(bias_change(self._counts[index]).view_as(bias), alpha=self._rate)
        load = ExpertLoad.of(self._counts.cpu(), num_tokens=1, top_k=self._top_k)
        return load.metrics() if load else {}
