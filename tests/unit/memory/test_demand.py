"""The memory needed to load a model, against counts by hand."""

from dataclasses import replace
from typing import Any

import pytest

from fsdptrain.errors import MemoryPlanError
from fsdptrain.memory.demand import (
    GIB,
    MemoryDemand,
    MemorySupply,
    check_load_memory,
    load_memory_line,
    load_memory_need,
)
from fsdptrain.model.structure import ParameterCounts, count_parameters
from tests import zoo

COUNTS = ParameterCounts(total=4_000_000_000, largest_layer=100_000_000, outside_layers=400_000_000)
DEMAND = MemoryDemand(counts=COUNTS, num_shards=8, compute_bytes=2)
GPU = MemorySupply(device_free=80 * GIB, host_free=500 * GIB, ranks_per_node=8, has_accelerator=True)
CPU = replace(GPU, device_free=0, has_accelerator=False)
SHARD = 4 * 500_000_000


GATHERED = 2 * (2 * 100_000_000 + 400_000_000)
ON_DEVICE = {
    "weights": SHARD,
    "Adam's moments": 2 * SHARD,
    "gradients": SHARD,
    "gathered layers": GATHERED,
    "gradients of one layer": (2 + 4) * 400_000_000,
}
ALL_SHARDS = {"weights": 8 * SHARD, "Adam's moments": 16 * SHARD, "gradients": 8 * SHARD}
HALF_FROZEN = {"counts": replace(COUNTS, frozen=COUNTS.total // 2)}  # e.g. a vision tower: no moments
MOVING = {"reference": True, "moving_reference": True}
WRITING = "the checkpoint in writing"
PARTS: list[tuple[dict[str, Any], dict[str, int | None], dict[str, int]]] = [  # options; changes of device; host
    ({}, {}, {}),
    ({"cpu_offload": True}, dict.fromkeys(ALL_SHARDS), ALL_SHARDS),
    (
        {"embedded_engine": True},
        {"the embedded engine": 2 * COUNTS.total, "gathered layers": None, "gradients of one layer": None},
        {},
    ),
    ({"reshard_after_forward": False}, {"gathered layers": 2 * COUNTS.total}, {}),
    (
        {"reference": True, "load_strategy": "rank0"},
        {},
        {"the reference": 8 * SHARD, "rank 0's whole copy": 4 * COUNTS.total},
    ),
    ({"async_save": True}, {}, {WRITING: 3 * 8 * SHARD}),
    ({"async_save": True, **MOVING}, {}, {"the reference": 8 * SHARD, WRITING: 4 * 8 * SHARD}),
]


@pytest.mark.parametrize(("options", "device", "host"), PARTS, ids=[str([*options]) for options, _, _ in PARTS])
def test_bytes_are_on_the_device_or_on_the_host(options, device, host):
    demand = replace(DEMAND, **options)
    need = load_memory_need(demand, GPU)
    assert need.device_parts == {name: size for name, size in {**ON_DEVICE, **device}.items() if size is not None}
    assert need.host_parts == host
    if not options:  # without a device
        assert load_memory_need(demand, CPU).device == 0
        assert load_memory_need(demand, CPU).host_parts == {name: 8 * size for name, size in ON_DEVICE.items()}


def test_a_checkpoint_in_writing_has_frozen_weights_without_moments() -> None:
    need = load_memory_need(replace(DEMAND, async_save=True, **HALF_FROZEN), GPU)
    assert need.host_parts == {WRITING: 8 * SHARD + 2 * 8 * SHARD // 2}


ADAPTER = 40_000_000
ADAPTED = replace(
    DEMAND, counts=ParameterCounts(COUNTS.total + ADAPTER, 101_000_000, 400_000_000, COUNTS.total, 1_000_000, ADAPTER)
)


def test_only_an_adapter_has_moments_and_frozen_weights_have_the_compute_dtype():
    need = load_memory_need(replace(ADAPTED, reference=True), GPU)  # another reference, by --ref-load
    own = 4 * ADAPTER // 8
    assert need.device_parts == {
        "weights": own + SHARD // 2,
        "Adam's moments": 2 * own,
        "gradients": own,
        "gathered layers": 2 * (2 * 101_000_000 + 400_000_000),
        "gradients of one layer": (2 + 4) * 1_000_000,
    }
    assert need.host_parts == {"the reference": 8 * SHARD // 2}
    engine = load_memory_need(replace(ADAPTED, embedded_engine=True), GPU).device_parts["the embedded engine"]
    assert engine == 2 * COUNTS.total
    assert "4.04 B parameters (40.00 M of them trained) over 8 shards" in load_memory_line(ADAPTED, GPU)


def test_a_few_frozen_weights_of_a_stock_model_are_not_the_base_of_an_adapter():
    """Biases of routers, in some families: the engine and the reference still hold the whole model."""
    partly = replace(DEMAND, counts=replace(COUNTS, frozen=8), reference=True, embedded_engine=True)
    need = load_memory_need(partly, GPU)
    assert need.device_parts["weights"] == SHARD
    assert need.device_parts["the embedded engine"] == 2 * COUNTS.total
    assert need.host_parts == {"the reference": 8 * SHARD}


def test_the_line_gives_need_and_supply():
    assert load_memory_line(DEMAND, GPU) == (
        "memory to load 4.00 B parameters over 8 shards, before activations: "
        "device 11.3 of 80.0 GiB free on each rank, host 0.0 of 500.0 GiB free for 8 ranks"
    )
    assert "device" not in load_memory_line(DEMAND, CPU)


@pytest.mark.parametrize(
    ("demand", "machine", "supply", "words"),
    [
        ({"num_shards": 1}, GPU, {"device_free": 16, "ranks_per_node": 1}, "device memory .*--fsdp-cpu-offload"),
        ({}, GPU, {"device_free": 8}, r"16 shards \(--nproc-per-node"),
        ({"embedded_engine": True}, GPU, {"device_free": 12}, "--rollout-engine vllm"),
        ({"cpu_offload": True}, GPU, {"host_free": 40}, "host memory .*--no-fsdp-cpu-offload"),
        ({"load_strategy": "rank0"}, GPU, {"host_free": 9}, "--load-strategy shard"),
        ({"reference": True}, GPU, {"host_free": 9}, "--kl-loss-coef 0"),
        ({"num_shards": 1}, GPU, {"device_free": 24}, "--lora-rank 32"),
        ({}, CPU, {"host_free": 1}, "a smaller --hf-checkpoint"),
    ],
)
def test_a_demand_that_does_not_fit_is_one_line_with_a_fix(demand, machine, supply, words):
    free = {name: value * GIB if name.endswith("_free") else value for name, value in supply.items()}
    with pytest.raises(MemoryPlanError, match=words) as caught:
        check_load_memory(replace(DEMAND, **demand), replace(machine, **free))
    assert "\n" not in str(caught.value)
    assert "--hf-checkpoint" in str(caught.value)


def test_the_bound_is_exact():
    need = load_memory_need(DEMAND, GPU).device
    check_load_memory(DEMAND, replace(GPU, device_free=need))
    with pytest.raises(MemoryPlanError):
        check_load_memory(DEMAND, replace(GPU, device_free=need - 1))
    check_load_memory(MemoryDemand(counts=count_parameters(zoo.build("llama")), num_shards=1, compute_bytes=4), CPU)
