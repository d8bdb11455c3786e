"""Options that reduce memory, and the message for a model that does not fit before activations."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fsdptrain.config import Config
from fsdptrain.config.checks import check
from fsdptrain.config.keys import all_keys
from fsdptrain.errors import ConfigError
from fsdptrain.memory.demand import MemoryNeed, MemorySupply, Shard, count, gib, memory_need

_ADAPTER_SHARE = 0.03  # of the weights: rank 32 on all linear layers of a 1 B model; less for larger models

OPTIMIZER_ON_HOST: Mapping[str, Any] = {"offload_optimizer": True}
STATE_ON_HOST: Mapping[str, Any] = {
    "offload_optimizer": False,
    "offload_optimizer_step": "host",
    "offload_train": False,
    "fsdp_cpu_offload": True,
}
_SINGLE: tuple[Mapping[str, Any], ...] = (
    {"load_strategy": "shard"},
    {"async_save": False},
    {"fsdp_reshard_after_forward": True},
    OPTIMIZER_ON_HOST,
    {"offload_train": True},
    STATE_ON_HOST,
    {"fsdp_cpu_offload": False},
    {"rollout_engine": "vllm-server", "rollout_num_servers": 1},
    {"ref_dtype": "bfloat16"},
    {"kl_loss_coef": 0},
    {"lora_rank": 32},
)


@dataclass(frozen=True)
class Changed:
    config: Config
    flags: tuple[str, ...]  # flags for the changed options
    cost: tuple[float, ...] = ()  # cost by kind of change; lower is better

    @property
    def is_valid(self) -> bool:
        """Whether a run accepts the options together."""
        try:
            check(self.config)
        except ConfigError:
            return False
        return True


def change(config: Config, values: Mapping[str, Any]) -> Changed:
    """Return `config` with the values of these flat keys. Does not validate the result."""
    changed = {flat: value for flat, value in values.items() if config.value(flat) != value}
    flags = [_flag(all_keys()[flat].flag, value) for flat, value in changed.items()]
    return Changed(config.with_values(**changed), tuple(flags))


def message(need: MemoryNeed, config: Config, shard: Shard, supply: MemorySupply) -> str:
    """Describe the memory that lacks, and the single changes that make the model fit."""
    lacks_device = need.device > supply.device_free and supply.has_accelerator
    kind, parts = ("device", need.device_parts) if lacks_device else ("host", need.host_parts)
    needed, free = (need.device, supply.device_free) if lacks_device else (need.host, supply.host_free)
    detail = ", ".join(f"{name} {gib(size)}" for name, size in sorted(parts.items(), key=lambda part: -part[1]))
    where = "on each rank" if lacks_device else f"for {supply.ranks_per_node} of its ranks"
    remedy = "; ".join(_remedies(config, shard, supply))
    return (
        f"--hf-checkpoint with {count(shard.counts.total)} parameters needs {gib(needed)} GiB of {kind} memory "
        f"{where} before activations ({detail}), {gib(free)} GiB are free: "
        f"{remedy or 'use a smaller --hf-checkpoint or a machine with more memory'}"
    )


def _remedies(config: Config, shard: Shard, supply: MemorySupply) -> Iterator[str]:
    """Yield the single changes that make the run fit."""
    for values in _SINGLE:
        if not values.keys() <= all_keys().keys() or ("rollout_engine" in values and not supply.has_accelerator):
            continue  # the feature is not installed; a server on CPUs would take the memory of this host
        found = change(config, values)
        sizes = with_adapter(shard) if "lora_rank" in values and not shard.counts.adapter else shard
        if found.flags and found.is_valid and memory_need(found.config, sizes, supply).fits(supply):
            yield " ".join(found.flags)
    for factor in (2, 4, 8, 16, 32, 64, 128):
        if memory_need(config, spread(shard, factor), supply).fits(supply):
            gpus = "--nproc-per-node, " if supply.has_accelerator else ""
            yield f"{factor * shard.num_shards} shards ({gpus}more machines, or a smaller --fsdp-replicate-size)"
            return


def spread(shard: Shard, factor: int) -> Shard:
    """Divide a shard over `factor` ranks."""
    trained, frozen = math.ceil(shard.trained / factor), math.ceil(shard.frozen / factor)
    return replace(shard, num_shards=factor * shard.num_shards, trained=trained, frozen=frozen)


def with_adapter(shard: Shard) -> Shard:
    """Approximate the counts with an adapter of rank 32."""
    counts = shard.counts
    trained = math.ceil(_ADAPTER_SHARE * counts.total)
    most_trained = math.ceil(_ADAPTER_SHARE * counts.largest_layer)
    adapted = replace(
        counts, total=counts.total + trained, frozen=counts.total, most_trained=most_trained, adapter=trained
    )
    return Shard.of(adapted, shard.num_shards)


def _flag(flag: str, value: Any) -> str:
    if isinstance(value, bool):
        return flag if value else f"--no-{flag.removeprefix('--')}"
    return f"{flag} {value}"
