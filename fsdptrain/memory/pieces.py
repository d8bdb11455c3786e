"""Compute what one rank holds of each parameter: tensor and expert parallelism split it first, FSDP shards the parts.

This needs only the model on meta and the mesh sizes, no process group. A test compares it with the shards that
`features/model_parallel/split.py` and `fsdp/wrap.py` create on a real mesh.
"""

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from torch import nn
from transformers import PreTrainedModel

from fsdptrain.fsdp.wrap import largest_shard
from fsdptrain.memory.grid import Grid
from fsdptrain.model.structure import ParameterCounts, repeated_layers


@dataclass(frozen=True)
class SplitPlan:
    """How layers and experts are split over ranks before sharding, by module and parameter names."""

    tensor: dict[str, str]  # module -> style of transformers, except those in `experts`
    experts: dict[str, str]
    tensor_dims: dict[str, int]  # parameter -> the dim that is split over tensor ranks


def split_plan_of(model: PreTrainedModel, grid: Grid) -> SplitPlan:
    """Return the split plan. Raises ConfigError if the model does not support the sizes of `grid`."""
    if not grid.is_split:
        return SplitPlan({}, {}, {})
    plan = importlib.import_module("fsdptrain.features.model_parallel.plan")
    return plan.split_plan(model, tensor_size=grid.tensor, expert_size=grid.expert)


@dataclass(frozen=True)
class Piece:
    """The part of one parameter on a rank."""

    numel: int  # elements that FSDP shards; a rank gathers all of them
    largest_shard: int  # elements of the largest shard
    trained: bool
    of_experts: bool  # on the mesh of the experts
    tensor_copies: int  # number of ranks of a tensor group that hold the same values


class Pieces:
    """The pieces of all parameters of `model`, which may be on meta or sharded."""

    def __init__(self, model: PreTrainedModel, grid: Grid, plan: SplitPlan | None = None) -> None:
        """`plan`: the split plan of the model, if known. Raises ConfigError if the model does not support the sizes."""
        self.grid = grid
        self._model = model
        self.plan = plan or split_plan_of(model, grid)
        self._pieces = {p: _piece(name, p, self.plan, grid) for name, p in model.named_parameters()}

    def __getitem__(self, parameter: nn.Parameter) -> Piece:
        return self._pieces[parameter]

    def of(self, parameters: Iterable[nn.Parameter]) -> list[Piece]:
        return [self._pieces[p] for p in parameters]

    @cached_property
    def tensor_parallel_parameters(self) -> set[nn.Parameter]:
        """Parameters of which the ranks of a tensor group hold different parts."""
        return {p for name, p in self._model.named_parameters() if name in self.plan.tensor_dims}

    @cached_property
    def outside_layers(self) -> list[Piece]:
        """Embedding, last norm, head."""
        return self.of(parameters_outside(self._model))

    @cached_property
    def gathered(self) -> ParameterCounts:
        """Sizes of the model that a rank would hold if everything were gathered."""
        return ParameterCounts(
            total=self.total(lambda piece: piece.numel),
            largest_layer=max(sum(x.numel for x in self.of(y.parameters())) for y in repeated_layers(self._model)),
            outside_layers=sum(piece.numel for piece in self.outside_layers),
        )

    def total(self, what: Callable[[Piece], int]) -> int:
        return sum(map(what, self._pieces.values()))


def parameters_outside(model: PreTrainedModel) -> list[nn.Parameter]:
    """Return the parameters outside the repeated layers: embedding, last norm, head."""
    inside = {p for layer in repeated_layers(model) for p in layer.parameters()}
    return [p for p in model.parameters() if p not in inside]


def _piece(name: str, parameter: nn.Parameter, plan: SplitPlan, grid: Grid) -> Piece:
    of_experts, dim = name in plan.experts, plan.tensor_dims.get(name)
    parts = grid.expert if of_experts else 1 if dim is None else grid.tensor
    shards = grid.expert_shards if of_experts else grid.shards
    return Piece(
        numel=largest_shard(parameter, 1, cut_dim=dim or 0, parts=parts),
        largest_shard=largest_shard(parameter, shards, cut_dim=dim or 0, parts=parts),
        trained=parameter.requires_grad,
        of_experts=of_experts,
        tensor_copies=1 if of_experts or dim is not None else grid.tensor,
    )
