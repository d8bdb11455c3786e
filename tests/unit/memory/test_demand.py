"""Memory is counted by hand here, once for each place where a byte can lie."""

from dataclasses import replace

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


def test_a_shard_lies_on_the_device_with_its_optimizer():
    need = load_memory_need(DEMAND, GPU)
    assert need.device_parts == {
        "weights": SHARD,
        "Adam's moments": 2 * SHARD,
        "gradients": SHARD,
        "gathered layers": 2 * (2 * 100_000_000 + 400_000_000),
        "gradients of one layer": (2 + 4) * 400_000_000,
    }
    assert need.host == 0


def test_offload_moves_the_shards_of_all_ranks_to_the_host():
    need = load_memory_need(replace(DEMAND, cpu_offload=True), GPU)
    assert need.host_parts == {"weights": 8 * SHARD, "Adam's moments": 16 * SHARD, "gradients": 8 * SHARD}
    assert set(need.device_parts) == {"gathered layers", "gradients of one layer"}


def test_the_engine_takes_the_place_of_the_gathered_layers():
    parts = load_memory_need(replace(DEMAND, embedded_engine=True), GPU).device_parts
    assert parts["the embedded engine"] == 2 * COUNTS.total
    assert "gathered layers" not in parts


def test_kept_layers_are_all_there():
    parts = load_memory_need(replace(DEMAND, reshard_after_forward=False), GPU).device_parts
    assert parts["gathered layers"] == 2 * COUNTS.total


def test_the_reference_and_a_whole_copy_are_on_the_host():
    need = load_memory_need(replace(DEMAND, reference=True, load_strategy="rank0"), GPU)
    assert need.host_parts == {"the reference": 8 * SHARD, "rank 0's whole copy": 4 * COUNTS.total}


def test_a_checkpoint_in_writing_is_on_the_host_where_the_weights_are_on_the_device():
    need = load_memory_need(replace(DEMAND, async_save=True), GPU)
    assert need.host_parts == {"the checkpoint in writing": 3 * 8 * SHARD}


def test_a_checkpoint_in_writing_holds_what_is_frozen_and_a_reference_that_moves():
    frozen = replace(DEMAND, counts=replace(COUNTS, frozen=COUNTS.total // 2), async_save=True)
    need = load_memory_need(frozen, GPU)  # a vision tower, say: no moments
    assert need.host_parts == {"the checkpoint in writing": 8 * SHARD + 2 * 8 * SHARD // 2}
    moving = load_memory_need(replace(DEMAND, async_save=True, reference=True, moving_reference=True), GPU)
    assert moving.host_parts == {"the reference": 8 * SHARD, "the checkpoint in writing": 4 * 8 * SHARD}


ADAPTER = 40_000_000
ADAPTED = replace(
    DEMAND, counts=ParameterCounts(COUNTS.total + ADAPTER, 101_000_000, 400_000_000, COUNTS.total, 1_000_000, ADAPTER)
)


def test_an_adapter_has_the_optimizer_and_frozen_weights_are_in_the_compute_dtype():
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


def test_what_a_stock_model_freezes_is_no_base_of_an_adapter():
    """Biases of routers, in some families: the engine and the reference still hold the whole model."""
    partly = replace(DEMAND, counts=replace(COUNTS, frozen=8), reference=True, embedded_engine=True)
    need = load_memory_need(partly, GPU)
    assert need.device_parts["weights"] == SHARD
    assert need.device_parts["the embedded engine"] == 2 * COUNTS.total
    assert need.host_parts == {"the reference": 8 * SHARD}


def test_without_a_device_everything_is_on_the_host():
    need, on_device = load_memory_need(DEMAND, CPU), load_memory_need(DEMAND, GPU)
    assert need.device == 0
    assert need.host_parts == {name: 8 * size for name, size in on_device.device_parts.items()}


def test_the_line_says_what_is_needed_and_what_is_there():
    assert load_memory_line(DEMAND, GPU) == (
        "memory to load 4.00 B parameters over 8 shards, before activations: "
        "device 11.3 of 80.0 GiB free on each rank, host 0.0 of 500.0 GiB free for 8 ranks"
    )
    assert "device" not in load_memory_line(DEMAND, CPU)


@pytest.mark.parametrize(
    ("demand", "supply", "words"),
    [
        (
            replace(DEMAND, num_shards=1),
            replace(GPU, device_free=16 * GIB, ranks_per_node=1),
            ["device memory", "--fsdp-cpu-offload"],
        ),
        (DEMAND, replace(GPU, device_free=8 * GIB), ["16 shards (--nproc-per-node"]),
        (replace(DEMAND, embedded_engine=True), replace(GPU, device_free=12 * GIB), ["--rollout-engine vllm"]),
        (replace(DEMAND, cpu_offload=True), replace(GPU, host_free=40 * GIB), ["host memory", "--no-fsdp-cpu-offload"]),
        (replace(DEMAND, load_strategy="rank0"), replace(GPU, host_free=9 * GIB), ["--load-strategy shard"]),
        (replace(DEMAND, reference=True), replace(GPU, host_free=9 * GIB), ["--kl-loss-coef 0"]),
        (replace(DEMAND, num_shards=1), replace(GPU, device_free=24 * GIB), ["--lora-rank 32"]),
        (DEMAND, replace(CPU, host_free=1 * GIB), ["a smaller --hf-checkpoint"]),
    ],
)
def test_what_cannot_fit_is_one_line_with_a_way_out(demand: MemoryDemand, supply: MemorySupply, words: list[str]):
    with pytest.raises(MemoryPlanError) as caught:
        check_load_memory(demand, supply)
    message = str(caught.value)
    assert "\n" not in message
    assert "--hf-checkpoint" in message
    assert [word for word in words if word not in message] == [], message


def test_what_just_fits_passes_and_a_byte_less_does_not():
    need = load_memory_need(DEMAND, GPU).device
    check_load_memory(DEMAND, replace(GPU, device_free=need))
    with pytest.raises(MemoryPlanError):
        check_load_memory(DEMAND, replace(GPU, device_free=need - 1))
    check_load_memory(MemoryDemand(counts=count_parameters(zoo.build("llama")), num_shards=1, compute_bytes=4), CPU)
