"""The memory of one rank, from parameter counts. A run checks it before loading, and `fsdptrain plan` adds activations.

Included before loading: float32 master weights and gradients of one shard (4 bytes each), the optimizer's state, frozen
weights in the compute dtype, the layers that are gathered at one time, the reference's shard, the copy of the embedded
engine, and a margin. Not included: activations, the KV cache, and the page cache, which the system frees on demand.
"""

import math
from dataclasses import dataclass

import torch

from fsdptrain.config import Config
from fsdptrain.errors import MemoryPlanError
from fsdptrain.model.structure import ParameterCounts
from fsdptrain.platform import GIB

MASTER_BYTES = 4  # float32
GATHERED_LAYERS = 2  # the current one and the prefetched one
MARGIN = 1.05  # fragmentation and kernel workspaces
Parts = dict[str, int]  # bytes by purpose


@dataclass(frozen=True)
class Shard:
    """The part of a model on one rank. [elements]"""

    counts: ParameterCounts  # of the whole model
    num_shards: int
    trained: int
    frozen: int
    gathered: ParameterCounts  # what the rank gathers: less than `counts` if layers or experts are split

    @classmethod
    def of(
        cls, counts: ParameterCounts, num_shards: int, *, gathered: ParameterCounts | None = None, copied: int = 0
    ) -> "Shard":
        """Divide the parameters evenly. copied: redundant elements in tensor ranks."""
        trained = math.ceil((counts.total - counts.frozen + copied) / num_shards)
        return cls(counts, num_shards, trained, math.ceil(counts.frozen / num_shards), gathered or counts)


@dataclass(frozen=True)
class MemorySupply:
    """Memory available to this rank. Without an accelerator, device memory is host memory."""

    device_free: int  # [bytes]
    host_free: int  # [bytes] of the node
    ranks_per_node: int
    has_accelerator: bool


@dataclass(frozen=True)
class MemoryNeed:
    """Required bytes by purpose: `device` per rank, `host` for all ranks of a node. Sums include the margin."""

    device_parts: Parts
    host_parts: Parts

    @property
    def device(self) -> int:
        return math.ceil(MARGIN * sum(self.device_parts.values()))

    @property
    def host(self) -> int:
        return math.ceil(MARGIN * sum(self.host_parts.values()))

    def fits(self, supply: MemorySupply) -> bool:
        return self.device <= supply.device_free and self.host <= supply.host_free


def compute_bytes(config: Config) -> int:
    return getattr(torch, config.compute_dtype_name).itemsize


def shard_state(config: Config, shard: Shard) -> tuple[Parts, Parts]:
    """Return the state of a shard on the device and on the host."""
    trained, frozen = MASTER_BYTES * shard.trained, _frozen_bytes(config, shard)
    state = {"weights": trained + frozen, "optimizer state": optimizer_bytes(config, shard), "gradients": trained}
    moved = {"optimizer state"} if config.optim.offload_optimizer else set()
    moved = set(state) if config.fsdp.cpu_offload else moved
    on_device = {name: size for name, size in state.items() if name not in moved}
    return on_device, {name: size for name, size in state.items() if name in moved}


def sections_memory(config: Config) -> tuple[Parts, Parts]:
    """Return what options of features add: on the device of a rank, and on the host of all shards of a model."""
    device, host = Parts(), Parts()
    for section in config.sections:
        of_device, of_host = section.memory(config)
        device |= of_device
        host |= of_host
    return device, host


def optimizer_bytes(config: Config, shard: Shard) -> int:
    """Return the bytes of the optimizer's state of a shard.

    All weights in layers count as matrices; norms and biases are few. Unknown optimizers count like AdamW.
    """
    adapter, momentum = bool(shard.counts.adapter), config.optim.sgd_momentum > 0
    outside = 0 if adapter else min(shard.trained, math.ceil(shard.counts.outside_layers / shard.num_shards))
    of_8_bits = 2 * MASTER_BYTES if adapter else 2 * (1 + MASTER_BYTES / 256)  # many rows of adapters are too short
    of_matrices, of_others = {
        "muon": (MASTER_BYTES, 2 * MASTER_BYTES),
        "adamw8bit": (of_8_bits, of_8_bits),
        "sgd": (MASTER_BYTES * momentum,) * 2,
    }.get(config.optim.optimizer, (2 * MASTER_BYTES,) * 2)
    return math.ceil(of_matrices * (shard.trained - outside) + of_others * outside)


def generation_need(config: Config, shard: Shard, cache: Parts, *, is_embedded: bool) -> Parts:
    """Return the device memory while an engine in this process generates. cache: its key-value cache.

    is_embedded: whether it is the embedded engine, which is whole on each rank.

    With --offload-train it is the larger of two: both copies of the weights, or the engine's weights and the cache.
    """
    held = {name: size for name, size in shard_state(config, shard)[0].items() if name != "gradients"}
    whole = shard.counts.total - shard.counts.adapter  # the adapter is merged
    over = 1 if is_embedded else max(section.engine_ranks for section in config.sections)
    engine = {"the engine's weights": math.ceil(compute_bytes(config) * whole / over)}
    most = max(shard.gathered.largest_layer, shard.gathered.outside_layers)
    layers = {"gathered layers": compute_bytes(config) * most}
    if not config.sync.offload_train:
        return held | engine | cache | layers
    weights = {name: size for name, size in held.items() if name == "weights"}
    return max(weights | engine | layers, engine | cache, key=lambda parts: sum(parts.values()))


def memory_need(config: Config, shard: Shard, supply: MemorySupply) -> MemoryNeed:
    """Return the peak memory of a rank without activations, while it trains or while the embedded engine generates."""
    counts, ranks = shard.counts, supply.ranks_per_node
    if not supply.has_accelerator:
        config = config.with_values(offload_train=False)  # it would copy, and save nothing
    on_device, on_host = shard_state(config, shard)
    device = on_device | _training_memory(config, shard)
    if config.generates and not config.engine_has_own_devices:
        is_embedded = config.rollout.engine in ("auto", "hf")  # auto may be: count the most
        generation = generation_need(config, shard, {}, is_embedded=is_embedded)
        device = max(device, generation, key=lambda parts: sum(parts.values()))
    host = {name: ranks * size for name, size in on_host.items()}
    if config.sync.offload_train:
        away = sum(size for name, size in on_device.items() if name != "gradients")
        host["the trainer, while the engine generates"] = ranks * away
    stored = _stored_bytes(config, shard)
    trained, frozen = MASTER_BYTES * shard.trained, _frozen_bytes(config, shard)
    if config.stores_reference:
        width = 2 if config.ref.dtype == "bfloat16" else MASTER_BYTES
        elements = shard.frozen + (0 if counts.adapter else shard.trained)  # the reference has no adapter
        host["the reference"] = ranks * min(width, stored) * elements
        if width < stored and frozen:  # that of trained weights takes the place of the gradients
            device["the frozen policy, while the reference computes"] = frozen
    if config.run.async_save:
        weights = trained if counts.adapter else trained + frozen  # only the adapter is written
        copies = 1 + (config.stores_reference and config.ref.update_interval is not None)  # a moving reference too
        host["the checkpoint in writing"] = ranks * (copies * weights + optimizer_bytes(config, shard))
    more, of_all_shards = sections_memory(config)
    device |= more
    host |= {name: ranks * math.ceil(size / shard.num_shards) for name, size in of_all_shards.items()}
    if config.model.load_strategy == "rank0":
        host["rank 0's whole copy"] = MASTER_BYTES * counts.total
    if supply.has_accelerator:
        return MemoryNeed(device, host)
    for name, size in device.items():
        host[name] = host.get(name, 0) + ranks * size
    return MemoryNeed({}, host)


def need_line(need: MemoryNeed, shard: Shard, supply: MemorySupply) -> str:
    """Return a line with needed and available memory, to print before loading."""
    counts, num_shards, ranks = shard.counts, shard.num_shards, supply.ranks_per_node
    trained = f" ({count(counts.total - counts.frozen)} of them trained)" if counts.frozen else ""
    size = f"{count(counts.total)} parameters{trained} over {num_shards} shard{'s' * (num_shards > 1)}"
    device = f"device {gib(need.device)} of {gib(supply.device_free)} GiB free on each rank, "
    host = f"host {gib(need.host)} of {gib(supply.host_free)} GiB free for {ranks} rank{'s' * (ranks > 1)}"
    return f"memory to load {size}, before activations: {device if supply.has_accelerator else ''}{host}"


def check_load_memory(config: Config, shard: Shard, supply: MemorySupply) -> str:
    """Return `need_line`. Raise MemoryPlanError with helpful flags if the model does not fit. Not collective."""
    need = memory_need(config, shard, supply)
    if need.fits(supply):
        return need_line(need, shard, supply)
    from fsdptrain.memory.remedies import message

    raise MemoryPlanError(message(need, config, shard, supply))


def _training_memory(config: Config, shard: Shard) -> Parts:
    """Return the temporary memory of training: gathered layers, and gradients before they are reduced."""
    counts, itemsize = shard.gathered, compute_bytes(config)
    resharded = config.fsdp.reshard_after_forward
    layers = GATHERED_LAYERS * counts.largest_layer if resharded else counts.total - counts.outside_layers
    gathered = (config.frozen_weight_bytes or itemsize) * layers + itemsize * counts.outside_layers
    reduction = (itemsize + MASTER_BYTES) * counts.reduced_at_once
    parts = {"gathered layers": math.ceil(gathered), "gradients of one layer": reduction}
    return parts | dequantized(config, counts.largest_layer)


def dequantized(config: Config, largest_layer: int) -> Parts:
    """Return the memory of one dequantized weight, at most a layer. Empty if weights are not quantized."""
    return {} if config.frozen_weight_bytes is None else {"a dequantized weight": compute_bytes(config) * largest_layer}


def _frozen_bytes(config: Config, shard: Shard) -> int:
    """Return the bytes of the frozen weights of a shard. In layers they may be quantized."""
    stored, quantized = _stored_bytes(config, shard), config.frozen_weight_bytes
    outside = min(shard.frozen, math.ceil(shard.counts.outside_layers / shard.num_shards))
    if quantized is None:
        return stored * shard.frozen
    return math.ceil(quantized * (shard.frozen - outside) + stored * outside)


def _stored_bytes(config: Config, shard: Shard) -> int:
    """Return the bytes of a frozen weight. Without an adapter, frozen weights are stored like the trained ones."""
    return compute_bytes(config) if shard.counts.adapter else MASTER_BYTES


def gib(size: int) -> str:
    return f"{size / GIB:.1f}"


def count(number: float) -> str:
    """Format a number: `4.02 B`, `100.93 M`, `2560`."""
    for size, unit in ((1e9, "B"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(int(number))
