"""The mixture-of-experts feature: router replay, and the load of the experts."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from fsdptrain.config import Config
from fsdptrain.data.routes import RouteRecorder
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import ConfigError
from fsdptrain.feature import Feature, Rows
from fsdptrain.features.moe.checks import check_replay
from fsdptrain.features.moe.replay import EngineRoutes, RouterReplay
from fsdptrain.features.sections import RouterConfig
from fsdptrain.fsdp.mesh import Meshes
from fsdptrain.model.sizes import expert_choice
from fsdptrain.model.structure import decoder_layers
from fsdptrain.protocols import ForwardRole
from fsdptrain.types import NO_ROUTE, Metrics, PackedBatch

_ROUTES = "routes"  # key of `LogProbs.extras`


class MoEFeature(Feature):
    """Replay of the experts of one run.

    Args:
        replay: `scoring`: train with the experts chosen in scoring; `rollout`: with the engine's experts.
        pack_copies: number of ranks that train on the same pack.
    """

    def __init__(self, *, replay: str, pack_copies: int = 1) -> None:
        self._scoring_records = replay == "scoring"
        self._pack_copies = pack_copies
        self._replay: RouterReplay | None = None
        self._records = False  # whether this forward pass is one of scoring whose routes are replayed

    @classmethod
    def create(cls, config: Config, checkpoint: Path) -> "MoEFeature":
        router, trust = config.section(RouterConfig), config.model.trust_remote_code
        with raise_on_all_ranks(ConfigError, "--router-replay"):
            model_config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=trust)
            check_replay(model_config, router.replay, trust_remote_code=trust)
        return cls(replay=router.replay, pack_copies=config.pack_copies)

    def route_recorder(self, model: PreTrainedModel) -> Callable[..., RouteRecorder] | None:
        choice = expert_choice(model.config)
        return None if choice is None else partial(EngineRoutes, RouterReplay(model, choice))

    def transform_model(self, model: PreTrainedModel, meshes: Meshes | None = None) -> None:
        """Wrap the routers. Runs after gradient checkpointing is enabled and before sharding."""
        choice = expert_choice(model.config)
        if choice is not None:
            self._replay = RouterReplay(model, choice)

    def forward(
        self, batch: PackedBatch, rows: Rows, role: ForwardRole, inputs: dict[str, Any]
    ) -> AbstractContextManager[None]:
        """Replay the routes of the pack, or record them when the policy scores. The reference routes freely."""
        self._records = role == "policy" and self._scoring_records
        routes = None if role == "reference" else _routes_of(batch)
        if self._replay is None or (routes is None and not self._records):
            return nullcontext()
        return self._replay.choosing(None if routes is None else rows.scatter(routes, fill=NO_ROUTE))

    def outputs(self, batch: PackedBatch, rows: Rows, output: Any) -> dict[str, Tensor]:
        if not self._records:
            return {}
        assert self._replay is not None
        routes = rows.gather(self._replay.routes.int())  # gloo does not support int16
        return {_ROUTES: rows.to_pack(routes, rows.tokens).to(torch.int16)}

    def before_step(self, model: PreTrainedModel, batches: Sequence[PackedBatch]) -> Metrics:
        """Count the choices of the whole step. Collective."""
        choice = expert_choice(model.config)
        assert choice is not None, "checked at start"
        counts = torch.zeros(len(decoder_layers(model)), choice.num_experts, dtype=torch.int64)
        for batch in batches:
            if (routes := _routes_of(batch)) is not None:
                counts += count_choices(routes, trained_tokens(batch), choice.num_experts)
        dist.all_reduce(counts)
        return load_metrics(counts // self._pack_copies)


def _routes_of(batch: PackedBatch) -> Tensor | None:
    """Return the experts to replay [T, layers, k], from the engine or from scoring."""
    return batch.extras.get(_ROUTES) if batch.routes is None else batch.routes


# The load of experts in a step: of the tokens of sequences with a loss, prompts included, on all ranks


def load_metrics(counts: Tensor) -> Metrics:
    """Return moe/load_max (most loaded expert of any layer, 1: balanced) and moe/dead_experts (a fraction).

    counts: [layers, experts] choices of the whole step. Layers without experts have none.
    """
    counts = counts[counts.sum(1) > 0].double()
    if not len(counts):
        return {}
    load = counts * counts.shape[1] / counts.sum(1, keepdim=True)
    return {"moe/load_max": load.max().item(), "moe/dead_experts": (load == 0).double().mean().item()}


def count_choices(routes: Tensor, counted: Tensor, num_experts: int) -> Tensor:
    """Count how often the counted tokens choose each expert: [layers, E] i64.

    routes: [T, layers, k], with NO_ROUTE. counted: [T] bool.
    """
    layers = routes.shape[1]
    experts = routes.long() + num_experts * torch.arange(layers, device=routes.device)[:, None]
    chosen = (routes != NO_ROUTE) & counted[:, None, None]
    counts = torch.zeros(layers * num_experts, dtype=torch.int64, device=routes.device)
    counts.index_add_(0, experts.clamp(min=0).flatten(), chosen.flatten().long())
    return counts.view(layers, num_experts)


def trained_tokens(batch: PackedBatch) -> Tensor:
    """Return [T] bool: tokens of sequences with a loss. Excludes filler packs and samples without a loss."""
    masks = batch.loss_mask.split(batch.seqlens)
    return torch.cat([mask.any().expand_as(mask) for mask in masks])
