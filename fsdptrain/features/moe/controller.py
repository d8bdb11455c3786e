"""What a run does with the experts of its model: their load, the loss or the bias that balances it, and the replay of
routes."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from fsdptrain.config import Config
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import ConfigError
from fsdptrain.features.moe.balance import ExpertLoad, add_router_loss, balance_loss, count_choices, trained_tokens
from fsdptrain.features.moe.bias import check_bias
from fsdptrain.features.moe.bias_update import RouterBiasUpdater
from fsdptrain.features.moe.checks import aux_loss_coef, check_replay
from fsdptrain.features.moe.replay import RouterReplay
from fsdptrain.model.inputs import Layout
from fsdptrain.model.policy import RouterFunction, evaluating, router_statistic
from fsdptrain.model.structure import decoder_layers, expert_choice

if TYPE_CHECKING:
    from fsdptrain.features.model_parallel.dispatch import Dispatches
from fsdptrain.types import LogProbs, LossOutput, PackedBatch


class MoEController:
    """Of one run. Without any of the --router flags it does nothing."""

    def __init__(self, config: Config, path: Path) -> None:
        """ConfigError on all ranks where the model cannot do what the options ask for; collective. Loads no weights."""
        router, trust = config.router, config.model.trust_remote_code
        self.replays = router.replay != "off"
        self.records = router.replay == "scoring"
        self._split = config.parallel.expert_parallel_size > 1
        self._coef = 0.0
        self._bias_rate = router.bias_update_rate
        self._copies = config.pack_copies
        if not self.replays and router.aux_loss_coef == 0 and self._bias_rate == 0:
            return
        with raise_on_all_ranks(ConfigError, "--router-replay, --router-aux-loss-coef, --router-bias-update-rate"):
            model_config = AutoConfig.from_pretrained(path, trust_remote_code=trust)
            self._coef = aux_loss_coef(model_config, router.aux_loss_coef, trust_remote_code=trust)
            if self.replays:
                check_replay(model_config, router.replay, trust_remote_code=trust)
            if self._bias_rate:
                check_bias(model_config, trust_remote_code=trust)

    def replay(self, model: PreTrainedModel) -> RouterReplay | None:
        """For `install_policy_forward`. After gradient checkpointing, before sharding."""
        choice = expert_choice(model.config)
        return RouterReplay(model, choice) if (self.replays or self._bias_rate) and choice else None

    def load(
        self, model: PreTrainedModel, batches: Sequence[PackedBatch], *, layout: Layout, device: torch.device
    ) -> ExpertLoad | None:
        """Of one optimizer step, from the routes that will be replayed, else from a forward pass. Collective.

        None where nobody asked for it. Waits for the device.
        """
        choice = expert_choice(model.config)
        if choice is None or not (self._coef or self.replays):
            return None
        num_experts, top_k = choice
        counted = [trained_tokens(batch) for batch in batches]
        if self.replays:
            counts = torch.zeros(len(decoder_layers(model)), num_experts, dtype=torch.int64)
            for batch, mask in zip(batches, counted, strict=True):
                counts += 0 if batch.routes is None else count_choices(batch.routes, mask, num_experts)
        else:
            with torch.no_grad(), evaluating(model):
                parts = [
                    router_statistic(
                        model, batch.to(device), partial(_count, mask.to(device), num_experts, top_k), layout=layout
                    )
                    for batch, mask in zip(batches, counted, strict=True)
                ]
            counts = torch.stack(parts).sum(0).cpu()
        totals = torch.cat([counts.flatten(), torch.stack([mask.sum() for mask in counted]).sum()[None]])
        dist.all_reduce(totals)
        totals //= self._copies
        return ExpertLoad.of(totals[:-1].view_as(counts), num_tokens=int(totals[-1]), top_k=top_k)

    def router_loss(self, batch: PackedBatch, load: ExpertLoad | None) -> RouterFunction | None:
        """What `policy_logprobs` makes of the router logits of `batch`, which lies on the device."""
        if load is None or not self._coef:
            return None
        counted = trained_tokens(batch)
        return lambda router_logits, tokens: balance_loss(router_logits, counted[tokens], load)

    def bias_balance(self, model: PreTrainedModel) -> RouterBiasUpdater | None:
        """Of one optimizer step. None where the biases stay as they are."""
        return RouterBiasUpdater(model, rate=self._bias_rate) if self._bias_rate else None

    def dispatches(self, model: PreTrainedModel) -> "Dispatches | None":
        """None where experts are not split."""
        if not self._split:
            return None
        from fsdptrain.features.model_parallel.dispatch import Dispatches  # of newer transformers

        return Dispatches(model)

    def add_loss(self, output: LossOutput, logprobs: LogProbs) -> LossOutput:
        return output if logprobs.router_loss is None else add_router_loss(output, logprobs.router_loss, self._coef)


def _count(counted: Tensor, num_experts: int, top_k: int, router_logits: Sequence[Tensor], tokens: Tensor) -> Tensor:
    routes = torch.stack([logits.topk(top_k).indices for logits in router_logits], dim=1)
    return count_choices(routes, counted[tokens], num_experts)
