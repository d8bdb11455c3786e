"""Find the best mesh for a model: memory, bytes sent, and the minimum time of a training step.

    machine = Cluster(num_gpus=256, gpu_memory=80 * GIB)
    best(model, config, machine, num_packs=1024)
    best_for_length(model, config, machine, length=131072, num_sequences=64)

This is an analytical estimate. Memory comes from the memory plan and bytes from `benchmarks/traffic.py`. Seconds follow
from the rates of a `Cluster`, taken from data sheets, and from a guessed fraction of the peak. FSDP communication is
assumed to overlap with computation; communication of layers and experts is not.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel

from benchmarks.traffic import Axis, Collective, Pack, step_traffic
from fsdptrain.config import Config
from fsdptrain.errors import ConfigError
from fsdptrain.features.activation_memory.config import ActivationMemoryConfig
from fsdptrain.features.context_parallel.config import ContextParallelConfig
from fsdptrain.features.context_parallel.recurrent import check_context_parallel
from fsdptrain.memory.flops import model_flops
from fsdptrain.memory.grid import Grid
from fsdptrain.memory.remedies import change
from fsdptrain.model.structure import expert_choice
from fsdptrain.tools.plan.plan import Machine, Planner, seqlens, with_margin

_HIDDEN: tuple[Axis, ...] = ("shard", "expert_shard", "replicate")
_MOST_TOKENS = 128 * 1024  # per GPU: longer packs do not fit next to larger models, and are slow to plan
_WAITED: tuple[Axis, ...] = ("tensor", "expert", "context")


@dataclass(frozen=True)
class Cluster:
    """Nodes of GPUs. Each GPU has a link within its node and a link to other nodes. [bytes/s, FLOP/s]"""

    num_gpus: int
    gpu_memory: int  # bytes
    gpus_per_node: int = 8
    inside: float = 450e9  # H100, NVLink, one direction
    outside: float = 50e9  # 400 Gbit/s
    peak: float = 989e12  # H100, dense bfloat16
    reached: float = 0.4  # fraction of the peak without waiting: a guess
    hop: float = 0.0  # latency of one hop of a ring, for any message size [s]


@dataclass(frozen=True)
class Estimate:
    """Costs of one rank for one optimizer step, forward and backward."""

    grid: Grid
    memory: int  # bytes, margin included
    traffic: tuple[Collective, ...]
    compute_s: float
    attention_s: float  # part of compute_s: attention over token pairs, quadratic in the length
    seconds: dict[Axis, float]

    @property
    def hidden_s(self) -> float:
        return sum(self.seconds.get(axis, 0.0) for axis in _HIDDEN)

    @property
    def busy_s(self) -> float:
        """Time for computation, and for waiting on tensor, expert and context groups."""
        return self.compute_s + sum(self.seconds.get(axis, 0.0) for axis in _WAITED)

    @property
    def step_s(self) -> float:
        return max(self.busy_s, self.hidden_s)

    @property
    def limit(self) -> str:
        """The part that takes longest."""
        waits = {"computation": self.compute_s, "gathers and reductions": self.hidden_s}
        waits |= {f"{axis} groups": self.seconds.get(axis, 0.0) for axis in _WAITED}
        return max(waits, key=lambda name: waits[name])

    def sent(self, *axes: Axis) -> float:
        """Bytes that leave the rank."""
        return sum(x.sent for x in self.traffic if x.axis in axes)


def best(
    model: PreTrainedModel, config: Config, cluster: Cluster, *, num_packs: int, planner: Planner | None = None
) -> Estimate | None:
    """Return the fastest mesh that fits, of those that a user would try. None if none fits. `model` is on meta.

    `planner`: a planner of the same model, whose cached results are reused.
    """
    configs = _meshes(model, config, cluster)
    return _fastest(model, configs, cluster, num_packs=num_packs, planner=planner)


def best_for_length(
    model: PreTrainedModel,
    config: Config,
    cluster: Cluster,
    *,
    length: int,
    num_sequences: int,
    planner: Planner | None = None,
) -> Estimate | None:
    """Return the fastest mesh where a pack is one sequence of `length` tokens, which may be sharded over ranks."""
    configs = _long_meshes(model, config, cluster, length)
    return _fastest(model, configs, cluster, num_packs=num_sequences, planner=planner)


def _fastest(
    model: PreTrainedModel, configs: Iterable[Config], cluster: Cluster, *, num_packs: int, planner: Planner | None
) -> Estimate | None:
    machine = Machine(cluster.num_gpus, cluster.gpu_memory)
    planner = Planner(model, machine) if planner is None else planner.on(machine)
    found = ((_costs(model, config, planner, cluster, num_packs=num_packs), config) for config in configs)
    known = [(costs, config) for costs, config in found if costs is not None]
    for costs, config in sorted(known, key=lambda one: one[0].step_s):  # memory is the slow part
        made = replace(costs, memory=with_margin(planner.training(config)))
        if made.memory <= cluster.gpu_memory:
            return made
    return None


def estimate(
    model: PreTrainedModel, config: Config, planner: Planner, cluster: Cluster, *, num_packs: int
) -> Estimate | None:
    """Estimate `num_packs` full packs over all ranks. Packs of a context group are larger by the group size.

    Returns None if the model does not allow the mesh.
    """
    costs = _costs(model, config, planner, cluster, num_packs=num_packs)
    return costs and replace(costs, memory=with_margin(planner.training(config)))


def _costs(
    model: PreTrainedModel, config: Config, planner: Planner, cluster: Cluster, *, num_packs: int
) -> Estimate | None:
    """Estimate everything except memory."""
    try:
        pieces = planner.pieces(config)
        context = config.section(ContextParallelConfig)
        if context.enabled:
            check_context_parallel(model, context, tensor_size=config.ranks_along("tensor"))
    except ConfigError:
        return None
    grid, tokens = pieces.grid, sum(seqlens(config))
    of_pack = step_traffic(model, config, pieces, [Pack(tokens * grid.context, tokens * grid.context)])
    copies = grid.tensor * grid.context  # ranks that share a pack
    own = math.ceil(num_packs * copies / grid.num_ranks)  # with fewer packs than ranks, some ranks compute empty packs
    traffic = [replace(x, calls=x.calls * own, size=x.size * own) for x in of_pack]
    again = 4 / 3 if config.section(ActivationMemoryConfig).gradient_checkpointing else 1.0
    of_all = seqlens(config, processes=grid.context)
    costs = model_flops(model)
    work = [x.training(of_all, sum(of_all), causal=True) for x in (costs, replace(costs, attention_width=0))]
    computing, products = (again * flops * own / copies / cluster.peak / cluster.reached for flops in work)
    seconds: dict[Axis, float] = {}
    for x in traffic:
        seconds[x.axis] = seconds.get(x.axis, 0.0) + _seconds(x, grid, cluster)
    return Estimate(grid, 0, tuple(traffic), computing, computing - products, seconds)


def _seconds(collective: Collective, grid: Grid, cluster: Cluster) -> float:
    """Compute the time from the slower of the links within and between nodes, plus the latency of the hops.

    Rings with several members per node use the links of all of them to other nodes; in an all-to-all, each rank uses
    its own link. A ring takes one hop per other member, an all-reduce two.
    """
    strides: dict[Axis, int] = {
        "tensor": 1,
        "expert": 1,
        "context": grid.tensor,
        "shard": grid.tensor,
        "expert_shard": grid.expert,
        "replicate": grid.shards * grid.tensor,
    }
    near = min(collective.ranks, max(1, cluster.gpus_per_node // strides[collective.axis]))
    rounds = {"all-reduce": 2, "all-to-all": 0}.get(collective.kind, 1)
    return rounds * collective.calls * (collective.ranks - 1) * cluster.hop + _sending(collective, near, cluster)


def _sending(collective: Collective, near: int, cluster: Cluster) -> float:
    """Return the transfer time. `near`: members of the group per node."""
    if near == collective.ranks:
        return collective.sent / cluster.inside
    within = collective.sent / cluster.inside if near > 1 else 0.0
    if collective.kind == "all-to-all":
        far = (collective.ranks - near) / (collective.ranks - 1)
        return max(within * (1 - far), collective.sent * far / cluster.outside)
    return max(within, collective.sent / near / cluster.outside)


def _meshes(model: PreTrainedModel, config: Config, cluster: Cluster) -> Iterator[Config]:
    """Tensor groups within a node; experts over one node or eight; one replica, or one per node or per eight nodes."""
    choice = expert_choice(model.config)
    nodes = (1, 8)
    sizes = [cluster.gpus_per_node * n for n in nodes]
    experts = [1, *(size for size in sizes if choice is not None and choice.num_experts % size == 0)]
    replicas = {1, *(cluster.num_gpus // size for size in sizes if cluster.num_gpus >= size)}
    for tensor in (1, 2, 4, 8):
        for expert in experts:
            for count in sorted(replicas):
                own = cluster.num_gpus // count
                if own % tensor == 0 and own % expert == 0 and own >= max(tensor, expert):
                    yield change(config, _sizes(tensor, expert, count)).config


def _long_meshes(model: PreTrainedModel, config: Config, cluster: Cluster, length: int) -> Iterator[Config]:
    """One replica; tensor and expert groups within a node; context groups of any size that limits tokens per GPU."""
    choice = expert_choice(model.config)
    near = cluster.gpus_per_node
    experts = [1] + [near] * (choice is not None and choice.num_experts % near == 0)
    for tensor in (1, 2, 4, 8):
        for expert in experts:
            for exponent in range(int(math.log2(cluster.num_gpus // tensor)) + 1):
                context = 2**exponent
                if length > context * _MOST_TOKENS:
                    continue
                sizes = _sizes(tensor, expert, 1, context) | {"max_tokens_per_gpu": math.ceil(length / context)}
                yield change(config, sizes).config


def _sizes(tensor: int, expert: int, replicas: int, context: int = 1) -> dict[str, Any]:
    return {
        "tensor_parallel_size": tensor,
        "expert_parallel_size": expert,
        "context_parallel_size": context,
        "fsdp_replicate_size": replicas,
    }


def flags(grid: Grid) -> Sequence[str]:
    """Return the flags for `grid`, except for default values."""
    wanted = _sizes(grid.tensor, grid.expert, grid.replicas, grid.context)
    return [f"--{name.replace('_', '-')} {size}" for name, size in wanted.items() if size > 1]
