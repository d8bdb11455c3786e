"""The message for a model that does not fit, with the single changes that make it fit."""

import math
from collections.abc import Mapping
from dataclasses import replace

from fsdptrain.memory.demand import MemoryDemand, MemorySupply, count, gib, load_memory_need
from fsdptrain.model.structure import ParameterCounts

_ADAPTER_SHARE = 0.03  # of the weights: rank 32 on all linear layers of a 1 B model; less for larger models


def message(
    kind: str, needed: int, parts: Mapping[str, int], free: int, demand: MemoryDemand, supply: MemorySupply
) -> str:
    largest_first = sorted(parts.items(), key=lambda part: -part[1])
    detail = ", ".join(f"{name} {gib(size)}" for name, size in largest_first)
    where = "on each rank" if kind == "device" else f"for {supply.ranks_per_node} of its ranks"
    remedies = _remedies(demand, supply)
    remedy = "; ".join(remedies) if remedies else "use a smaller --hf-checkpoint or a machine with more memory"
    return (
        f"--hf-checkpoint with {count(demand.counts.total)} parameters needs {gib(needed)} GiB of {kind} memory "
        f"{where} before activations ({detail}), {gib(free)} GiB are free: {remedy}"
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
    most_trained = math.ceil(_ADAPTER_SHARE * counts.largest_layer)
    return replace(
        counts, total=counts.total + trained, frozen=counts.total, most_trained=most_trained, adapter=trained
    )


def _fits(demand: MemoryDemand, supply: MemorySupply) -> bool:
    need = load_memory_need(demand, supply)
    return need.device <= supply.device_free and need.host <= supply.host_free


def _doublings(start: int) -> list[int]:
    return [start * 2**i for i in range(1, 8)]
