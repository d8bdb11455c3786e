"""Estimate the memory of one rank before anything is loaded, from exact parameter counts.

Included: float32 master weights, Adam's two moments and gradients of one shard (4 bytes each), frozen weights in the
compute dtype, the layers that are gathered at one time, the reference's shard, the copy of the embedded engine, and a
margin. Not included: activations, the KV cache, and the page cache, which the system frees on demand.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fsdptrain.config import Config
from fsdptrain.errors import MemoryPlanError
from fsdptrain.memory.grid import Grid
from fsdptrain.model.structure import ParameterCounts
from fsdptrain.platform import GIB

if TYPE_CHECKING:
    from fsdptrain.memory.pieces import Pieces

MASTER_BYTES = 4  # float32
GATHERED_LAYERS = 2  # the current one and the prefetched one
DEVICE_MARGIN = 1.05  # fragmentation and kernel workspaces
HOST_MARGIN = 1.05


@dataclass(frozen=True)
class MemoryDemand:
    """The settings that determine the memory demand of a rank."""

    counts: ParameterCounts
    num_shards: int  # ranks over which one replica is sharded
    compute_bytes: int  # per gathered element: 2 for bfloat16 and float16, 4 for float32
    cpu_offload: bool = False
    offload_optimizer: bool = False  # only Adam's moments on the host
    reshard_after_forward: bool = True
    embedded_engine: bool = False  # a whole copy in the compute dtype, between the training steps
    offload_train: bool = False  # beside the engine only the trainer's weights, and only during the weight sync
    reference: bool = False  # another shard of the weights, on the host
    load_strategy: str = "shard"
    async_save: bool = False  # a host copy of the checkpoint content while it is written
    moving_reference: bool = False  # the reference is part of the checkpoint
    gathered: ParameterCounts | None = None  # if layers or experts are split: the part that a rank gathers
    copied: int = 0  # redundant elements in tensor ranks


def demand_of(
    config: Config, grid: Grid, counts: ParameterCounts, *, embedded_engine: bool, pieces: "Pieces | None" = None
) -> MemoryDemand:
    """Return the demand of a run of `config` on `grid` whose model has `counts`.

    pieces: the parts of the parameters on a rank, if layers or experts are split.
    """
    assert pieces is not None or not grid.is_split
    return MemoryDemand(
        counts=counts,
        num_shards=grid.shards * grid.tensor,
        gathered=pieces.gathered if pieces is not None and grid.is_split else None,
        copied=0 if pieces is None else pieces.total(lambda piece: (piece.tensor_copies - 1) * piece.numel),
        compute_bytes=getattr(torch, config.compute_dtype_name).itemsize,
        cpu_offload=config.fsdp.cpu_offload,
        offload_optimizer=config.optim.offload_optimizer,
        reshard_after_forward=config.fsdp.reshard_after_forward,
        embedded_engine=embedded_engine,
        offload_train=config.sync.offload_train,
        reference=config.stores_reference,
        load_strategy=config.model.load_strategy,
        async_save=config.run.async_save,
        moving_reference=config.ref.update_interval is not None,
    )


@dataclass(frozen=True)
class MemorySupply:
    """Memory available to this rank. Without an accelerator, device memory is host memory."""

    device_free: int  # [bytes]
    host_free: int  # [bytes] of the node
    ranks_per_node: int
    has_accelerator: bool


@dataclass(frozen=True)
class MemoryNeed:
    """Required bytes by purpose: `device` per rank, `host` for all ranks of a node. Sums include the margins."""

    device_parts: Mapping[str, int]
    host_parts: Mapping[str, int]

    @property
    def device(self) -> int:
        return math.ceil(DEVICE_MARGIN * sum(self.device_parts.values()))

    @property
    def host(self) -> int:
        return math.ceil(HOST_MARGIN * sum(self.host_parts.values()))


def load_memory_need(demand: MemoryDemand, supply: MemorySupply) -> MemoryNeed:
    """Return the peak memory of a rank, while it trains or while the embedded engine generates."""
    counts, ranks = demand.counts, supply.ranks_per_node
    trained = MASTER_BYTES * math.ceil((counts.total - counts.frozen + demand.copied) / demand.num_shards)
    # Without an adapter, frozen weights are stored like the trained ones.
    stored = demand.compute_bytes if counts.adapter else MASTER_BYTES
    frozen = stored * math.ceil(counts.frozen / demand.num_shards)
    state = {"weights": trained + frozen, "Adam's moments": 2 * trained, "gradients": trained}
    on_host = set(state) if demand.cpu_offload else {"Adam's moments"} if demand.offload_optimizer else set()
    on_device = {name: size for name, size in state.items() if name not in on_host}
    while_generating = {"weights": on_device["weights"]} if demand.offload_train else on_device
    moments = (on_device | _training_memory(demand), while_generating | _engine_memory(demand))
    device = dict(max(moments, key=lambda parts: sum(parts.values())))
    host = {name: ranks * size for name, size in state.items() if name in on_host}
    if demand.offload_train and supply.has_accelerator:
        away = sum(size for name, size in on_device.items() if name != "gradients")
        host["the trainer, while the engine generates"] = ranks * away
    if demand.reference:
        host["the reference"] = ranks * (frozen if counts.adapter else frozen + trained)  # the reference has no adapter
    if demand.async_save:
        weights = trained if counts.adapter else trained + frozen  # only the adapter is written
        copies = 1 + (demand.reference and demand.moving_reference)
        host["the checkpoint in writing"] = ranks * (copies * weights + 2 * trained)
    if demand.load_strategy == "rank0":
        host["rank 0's whole copy"] = MASTER_BYTES * counts.total
    if supply.has_accelerator:
        return MemoryNeed(device, host)
    for name, size in device.items():
        host[name] = host.get(name, 0) + ranks * size
    return MemoryNeed({}, host)


def load_memory_line(demand: MemoryDemand, supply: MemorySupply) -> str:
    """Return a line with needed and available memory, to print before loading."""
    need = load_memory_need(demand, supply)
    counts = demand.counts
    trained = f" ({count(counts.total - counts.frozen)} of them trained)" if counts.frozen else ""
    size = f"{count(counts.total)} parameters{trained} over {demand.num_shards} shard{'s' * (demand.num_shards > 1)}"
    device = f"device {gib(need.device)} of {gib(supply.device_free)} GiB free on each rank, "
    host = f"host {gib(need.host)} of {gib(supply.host_free)} GiB free for {supply.ranks_per_node} rank"
    host += "s" * (supply.ranks_per_node > 1)
    return f"memory to load {size}, before activations: {device if supply.has_accelerator else ''}{host}"


def check_load_memory(demand: MemoryDemand, supply: MemorySupply) -> None:
    """Raise MemoryPlanError with helpful flags if the model does not fit. Not collective: use `raise_on_all_ranks`."""
    need = load_memory_need(demand, supply)
    if supply.has_accelerator and need.device > supply.device_free:
        kind, needed, parts, free = "device", need.device, need.device_parts, supply.device_free
    elif need.host > supply.host_free:
        kind, needed, parts, free = "host", need.host, need.host_parts, supply.host_free
    else:
        return
    from fsdptrain.memory.remedies import message

    raise MemoryPlanError(message(kind, needed, parts, free, demand, supply))


def _training_memory(demand: MemoryDemand) -> dict[str, int]:
    """Return the temporary memory of training: gathered layers, and gradients before they are reduced."""
    counts = demand.gathered or demand.counts
    layers = (
        GATHERED_LAYERS * counts.largest_layer if demand.reshard_after_forward else counts.total - counts.outside_layers
    )
    gathered = demand.compute_bytes * (layers + counts.outside_layers)
    reduction = (demand.compute_bytes + MASTER_BYTES) * counts.reduced_at_once
    return {"gathered layers": gathered, "gradients of one layer": reduction}


def _engine_memory(demand: MemoryDemand) -> dict[str, int]:
    """Return the memory of the embedded engine: its copy of the model."""
    whole = demand.compute_bytes * (demand.counts.total - demand.counts.adapter)  # the adapter is merged
    return {"the embedded engine": whole} if demand.embedded_engine else {}


def gib(size: int) -> str:
    return f"{size / GIB:.1f}"


def count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e8 else f"{number / 1e6:.2f} M"
