"""The mixture-of-experts feature: the load-balancing loss and router replay."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from fsdptrain.config import Config
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import ConfigError
from fsdptrain.feature import Feature, ForwardPass, RouteRecorder
from fsdptrain.features.moe.balance import ExpertLoad, add_router_loss, balance_loss, count_choices, trained_tokens
from fsdptrain.features.moe.checks import aux_loss_coef, check_replay
from fsdptrain.features.moe.config import RouterConfig
from fsdptrain.features.moe.replay import EngineRoutes, RouterReplay
from fsdptrain.fsdp.mesh import Meshes
from fsdptrain.model.rows import Rows
from fsdptrain.model.structure import decoder_layers, expert_choice
from fsdptrain.protocols import ForwardRole, Loss
from fsdptrain.types import NO_ROUTE, LogProbs, LossConfig, LossOutput, Metrics, PackedBatch

_CHOICES, _LOSS, _ROUTES = "moe/choices", "moe/router_loss", "routes"  # keys of `LogProbs.extras`


class MoEFeature(Feature):
    """Balancing and replay of the experts of one run.

    Args:
        loss_coef: coefficient of the load-balancing loss; 0: off.
        replay: `scoring`: train with the experts of scoring; `rollout`: with those of the engine.
        pack_copies: number of ranks that train on the same pack.
    """

    def __init__(self, *, loss_coef: float = 0.0, replay: str = "off", pack_copies: int = 1) -> None:
        self._coef = loss_coef
        self._replays = replay != "off"
        self._scoring_records = replay == "scoring"
        self._pack_copies = pack_copies
        self._replay: RouterReplay | None = None
        self._load: ExpertLoad | None = None  # of the current optimizer step
        self._counted: Tensor | None = None  # [T] bool: tokens of the pack whose choices are counted
        self._top_k = 0  # number of experts per token for these choices
        self._records = False  # whether this forward pass is one of scoring whose routes are replayed

    @classmethod
    def create(cls, config: Config, checkpoint: Path) -> "MoEFeature":
        router, trust = config.section(RouterConfig), config.model.trust_remote_code
        with raise_on_all_ranks(ConfigError, "--router-replay, --router-aux-loss-coef"):
            model_config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=trust)
            coef = aux_loss_coef(model_config, router.aux_loss_coef, trust_remote_code=trust)
            if router.replay != "off":
                check_replay(model_config, router.replay, trust_remote_code=trust)
        return cls(loss_coef=coef, replay=router.replay, pack_copies=config.pack_copies)

    def route_recorder(self, model: PreTrainedModel) -> Any:
        choice = expert_choice(model.config)
        return None if choice is None else partial(_recorder, RouterReplay(model, choice))

    # The forward pass

    def transform_model(self, model: PreTrainedModel, meshes: Meshes | None = None) -> None:
        """Wrap the routers. Runs after gradient checkpointing is enabled and before sharding."""
        del meshes
        choice = expert_choice(model.config)
        if choice is not None and self._replays:
            self._replay = RouterReplay(model, choice)

    def forward(
        self, batch: PackedBatch, rows: Rows, role: ForwardRole, inputs: dict[str, Any]
    ) -> AbstractContextManager[None]:
        """Replay the routes of the pack, or record those of scoring by the policy. The reference chooses itself."""
        if self._reads_logits:
            inputs["output_router_logits"] = True
        self._records = role == "policy" and self._scoring_records
        routes = None if role == "reference" else _routes_of(batch)
        if self._replay is None or (routes is None and not self._records):
            return nullcontext()
        return self._replay.choosing(None if routes is None else rows.scatter(routes, fill=NO_ROUTE))

    def outputs(self, batch: PackedBatch, rows: Rows, output: Any) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        if self._reads_logits:
            logits = [rows.gather(x.flatten(0, -2)) for x in output.router_logits]
            if self._load is not None:
                counted = trained_tokens(batch).index_select(0, rows.tokens)
                found[_LOSS] = rows.total(balance_loss(logits, counted, self._load))
            else:
                assert self._counted is not None
                counted = self._counted.to(logits[0].device).index_select(0, rows.tokens)
                found[_CHOICES] = rows.total(_count(logits, counted, self._top_k))
        if self._records:
            assert self._replay is not None
            routes = rows.gather(self._replay.routes.int())  # gloo does not support int16
            found[_ROUTES] = rows.to_pack(routes, rows.tokens).to(torch.int16)
        return found

    @property
    def _reads_logits(self) -> bool:
        return self._counted is not None or (self._load is not None and bool(self._coef))

    # The optimizer step

    def before_step(self, model: PreTrainedModel, batches: Sequence[PackedBatch], forward: ForwardPass) -> None:
        """Count the choices of the whole step if the loss or a metric needs them. Waits for the device."""
        choice = expert_choice(model.config)
        if choice is not None and (self._coef or self._replays):
            self._load = self._load_of(model, batches, forward, num_experts=choice.num_experts, top_k=choice.top_k)

    def loss_function(self, stock: Loss) -> Loss:
        def with_router_loss(batch: PackedBatch, logprobs: LogProbs, config: LossConfig) -> LossOutput:
            output, router_loss = stock(batch, logprobs, config), logprobs.extras.get(_LOSS)
            return output if router_loss is None else add_router_loss(output, router_loss, self._coef)

        return with_router_loss

    def after_step(self, *, updated: bool) -> Metrics:
        metrics = {} if self._load is None else self._load.metrics()
        self._load = None
        return metrics

    def _load_of(
        self,
        model: PreTrainedModel,
        batches: Sequence[PackedBatch],
        forward: ForwardPass,
        *,
        num_experts: int,
        top_k: int,
    ) -> ExpertLoad | None:
        """Compute the load from the routes to replay, or else from a forward pass over each pack."""
        counted = [trained_tokens(batch) for batch in batches]
        counts = torch.zeros(len(decoder_layers(model)), num_experts, dtype=torch.int64)
        if self._replays:
            for batch, mask in zip(batches, counted, strict=True):
                routes = _routes_of(batch)
                counts += 0 if routes is None else count_choices(routes, mask, num_experts)
        else:
            parts = [self._choices(batch, mask, forward, top_k) for batch, mask in zip(batches, counted, strict=True)]
            counts = torch.stack(parts).sum(0).cpu()
        totals = torch.cat([counts.flatten(), torch.stack([mask.sum() for mask in counted]).sum()[None]])
        dist.all_reduce(totals)
        totals //= self._pack_copies
        return ExpertLoad.of(totals[:-1].view_as(counts), num_tokens=int(totals[-1]), top_k=top_k)

    def _choices(self, batch: PackedBatch, counted: Tensor, forward: ForwardPass, top_k: int) -> Tensor:
        self._counted, self._top_k = counted, top_k
        try:
            return forward(batch)[_CHOICES]
        finally:
            self._counted = None


def _routes_of(batch: PackedBatch) -> Tensor | None:
    """Return the experts to replay [T, layers, k]: those of the engine, or of scoring."""
    return batch.extras.get(_ROUTES) if batch.routes is None else batch.routes


def _count(router_logits: Sequence[Tensor], counted: Tensor, top_k: int) -> Tensor:
    """Count how often the tokens [t] with `counted` choose each expert: [layers, E] i64."""
    routes = torch.stack([logits.topk(top_k).indices for logits in router_logits], dim=1)
    return count_choices(routes, counted, router_logits[0].shape[-1])


def _recorder(replay: RouterReplay, prompt_lengths: Sequence[int], prompt_of_row: Sequence[int]) -> RouteRecorder:
    return EngineRoutes(replay, prompt_lengths, prompt_of_row)
