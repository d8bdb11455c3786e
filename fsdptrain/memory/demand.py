"""Estimate the memory of one rank before anything is loaded, from exact parameter counts.

Included: float32 master weights, Adam's two moments and gradients of one shard (4 bytes each), frozen weights in the
compute dtype, the layers that are gathered at one time, the reference's shard, the copy of the embedded engine, and a
margin. Not included: activations, the KV cache, and the page cache, which the system frees on demand.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from fsdptrain.config import Config
from fsdptrain.errors import MemoryPlanError
from fsdptrain.memory.pieces import Pieces
from fsdptrain.model.structure import ParameterCounts
from fsdptrain.platform import GIB

MASTER_BYTES = 4  # float32
GATHERED_LAYERS = 2  # the current one and the prefetched one
DEVICE_MARGIN = 1.05  # fragmentation and kernel workspaces
HOST_MARGIN = 1.05
_ADAPTER_SHARE = 0.03  # of the weights: rank 32 on all linear layers of a 1 B model; less for larger models


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


def demand_of(config: Config, pieces: Pieces, counts: ParameterCounts, *, embedded_engine: bool) -> MemoryDemand:
    """Return the demand of a run of `config` whose model has `counts`, split and sharded as `pieces`."""
    grid = pieces.grid
    return MemoryDemand(
        counts=counts,
        num_shards=grid.shards * grid.tensor,
        gathered=pieces.gathered if grid.is_split else None,
        copied=pieces.total(lambda piece: (piece.tensor_copies - 1) * piece.numel),
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
    moved = set(state) if demand.cpu_offload else {"Adam's moments"} if demand.offload_optimizer else set()
    stays = {name: size for name, size in state.items() if name not in moved}
    beside_engine = {"weights": stays["weights"]} if demand.offload_train else stays
    moments = (stays | _training_memory(demand), beside_engine | _engine_memory(demand))
    device = dict(max(moments, key=lambda parts: sum(parts.values())))
    host = {name: ranks * size for name, size in state.items() if name in moved}
    if demand.offload_train and supply.has_accelerator:
        away = sum(size for name, size in stays.items() if name != "gradients")
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
    trained = f" ({_count(counts.total - counts.frozen)} of them trained)" if counts.frozen else ""
    size = f"{_count(counts.total)} parameters{trained} over {demand.num_shards} shard{'s' * (demand.num_shards > 1)}"
    device = f"device {_gib(need.device)} of {_gib(supply.device_free)} GiB free on each rank, "
    host = f"host {_gib(need.host)} of {_gib(supply.host_free)} GiB free for {supply.ranks_per_node} rank"
    host += "s" * (supply.ranks_per_node > 1)
    return f"memory to load {size}, before activations: {device if supply.has_accelerator else ''}{host}"


def check_load_memory(demand: MemoryDemand, supply: MemorySupply) -> None:
    """Raise MemoryPlanError with helpful flags if the model does not fit. Not collective: use `raise_on_all_ranks`."""
    need = load_memory_need(demand, supply)
    if supply.has_accelerator and need.device > supply.device_free:
        raise MemoryPlanError(_message("device", need.device, need.device_parts, supply.device_free, demand, supply))
    if need.host > supply.host_free:
        raise MemoryPlanError(_message("host", need.host, need.host_parts, supply.host_free, demand, supply))


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


def _message(
    kind: str, needed: int, parts: Mapping[str, int], free: int, demand: MemoryDemand, supply: MemorySupply
) -> str:
    largest_first = sorted(parts.items(), key=lambda part: -part[1])
    detail = ", ".join(f"{name} {_gib(size)}" for name, size in largest_first)
    where = "on each rank" if kind == "device" else f"for {supply.ranks_per_node} of its ranks"
    remedies = _remedies(demand, supply)
    way_out = "; ".join(remedies) if remedies else "use a smaller --hf-checkpoint or a machine with more memory"
    return (
        f"--hf-checkpoint with {_count(demand.counts.total)} parameters needs {_gib(needed)} GiB of {kind} memory "
        f"{where} before activations ({detail}), {_gib(free)} GiB are free: {way_out}"
    )


def _remedies(demand: MemoryDemand, supply: MemorySupply) -> list[str]:
    """Return the single changes that make the run fit."""
    more_ranks = next((n for n in _doublings(demand.num_shards) if _fits(replace(demand, num_shards=n), supply)), None)
    changes = [
        ("--load-strategy shard", replace(demand, load_strategy="shard")),
        ("--no-async-save", replace(demand, async_save=False)),
        ("--fsdp-reshard-after-forward", replace(demand, reshard_after_forward=True)),
        ("--offload-optimizer", replace(demand, offload_optimizer=not demand.cpu_offload)),
        ("--offload-train", replace(demand, offload_train=not demand.cpu_offload)),
        ("--fsdp-cpu-offload", replace(demand, cpu_offload=True, offload_train=False)),
        ("--no-fsdp-cpu-offload", replace(demand, cpu_offload=False)),
        ("--rollout-engine vllm", replace(demand, embedded_engine=False)),
        ("--kl-loss-coef 0", replace(demand, reference=False)),
        ("--lora-rank 32", replace(demand, counts=with_adapter(demand.counts), reference=False)),
    ]
    if demand.gathered is not None:  # config/checks.py: incompatible with split layers or experts
        changes = [change for change in changes if change[0] not in ("--fsdp-cpu-offload", "--lora-rank 32")]
    if not supply.has_accelerator:  # without a device, offload moves nothing and vLLM does not run
        changes = [change for change in changes if "offload" not in change[0] and "vllm" not in change[0]]
    enough = [flag for flag, changed in changes if changed != demand and _fits(changed, supply)]
    if more_ranks is not None:
        gpus = "--nproc-per-node, " if supply.has_accelerator else ""
        enough.append(f"{more_ranks} shards ({gpus}more machines, or a smaller --fsdp-replicate-size)")
    return enough


def with_adapter(counts: ParameterCounts) -> ParameterCounts:
    """Approximate the counts with an adapter of rank 32."""
    if counts.adapter:
        return counts
    trained = math.ceil(_ADAPTER_SHARE * counts.total)
    most = math.ceil(_ADAPTER_SHARE * counts.largest_layer)
    return replace(counts, total=counts.total + trained, frozen=counts.total, most_trained=most, adapter=trained)


def _fits(demand: MemoryDemand, supply: MemorySupply) -> bool:
    need = load_memory_need(demand, supply)
    return need.device <= supply.device_free and need.host <= supply.host_free


def _doublings(start: int) -> list[int]:
    return [start * 2**i for i in range(1, 8)]


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e8 else f"{number / 1e6:.2f} M"
