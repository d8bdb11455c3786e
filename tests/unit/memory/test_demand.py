"""The memory needed to load a model, against counts by hand."""

import re
from dataclasses import replace
from typing import Any

import pytest

from fsdptrain.config import Config
from fsdptrain.errors import MemoryPlanError
from fsdptrain.memory.demand import (
    GIB,
    MemoryNeed,
    MemorySupply,
    Shard,
    check_load_memory,
    memory_need,
    need_line,
)
from fsdptrain.model.structure import ParameterCounts, count_parameters
from tests import zoo

COUNTS = ParameterCounts(total=4_000_000_000, largest_layer=100_000_000, outside_layers=400_000_000)
OF_8 = Shard.of(COUNTS, 8)
SFT = {"algorithm": "sft", "eval_interval": 0}  # no engine
KL = {"algorithm": "grpo", "eval_interval": 0, "kl_loss_coef": 0.1, "rollout_engine": "vllm-server"}
KL |= {"rollout_num_servers": 1}  # an engine with its own devices
GPU = MemorySupply(device_free=80 * GIB, host_free=500 * GIB, ranks_per_node=8, has_accelerator=True)
CPU = replace(GPU, device_free=0, has_accelerator=False)
SHARD = 4 * 500_000_000


def config(**options: Any) -> Config:
    return Config(hf_checkpoint="a model", **{**({} if "algorithm" in options else SFT), **options})


def need(shard: Shard = OF_8, supply: MemorySupply = GPU, **options: Any) -> MemoryNeed:
    return memory_need(config(**options), shard, supply)


GATHERED = 2 * (2 * 100_000_000 + 400_000_000)
ON_DEVICE = {
    "weights": SHARD,
    "optimizer state": 2 * SHARD,
    "gradients": SHARD,
    "gathered layers": GATHERED,
    "gradients of one layer": (2 + 4) * 400_000_000,
}
ALL_SHARDS = {"weights": 8 * SHARD, "optimizer state": 16 * SHARD, "gradients": 8 * SHARD}
WRITING = "the checkpoint in writing"
PARTS: list[tuple[dict[str, Any], dict[str, int | None], dict[str, int]]] = [  # options; changes of device; host
    ({}, {}, {}),
    ({"fsdp_cpu_offload": True}, dict.fromkeys(ALL_SHARDS), ALL_SHARDS),
    ({"offload_optimizer": True}, {"optimizer state": None}, {"optimizer state": 16 * SHARD}),
    ({"optimizer": "muon"}, {"optimizer state": SHARD + 4 * 50_000_000}, {}),
    ({"optimizer": "adamw8bit"}, {"optimizer state": 500_000_000 * (256 + 4) // 128}, {}),
    ({"optimizer": "sgd"}, {"optimizer state": 0}, {}),
    ({"optimizer": "sgd", "sgd_momentum": 0.9}, {"optimizer state": SHARD}, {}),
    (
        {"algorithm": "grpo"},
        {
            "the engine's weights": 2 * COUNTS.total,
            "gradients": None,
            "gathered layers": 2 * 400_000_000,
            "gradients of one layer": None,
        },
        {},
    ),
    ({"fsdp_reshard_after_forward": False}, {"gathered layers": 2 * COUNTS.total}, {}),
    ({**KL, "load_strategy": "rank0"}, {}, {"the reference": 8 * SHARD, "rank 0's whole copy": 4 * COUNTS.total}),
    ({"async_save": True}, {}, {WRITING: 3 * 8 * SHARD}),
    ({**KL, "ref_dtype": "bfloat16"}, {}, {"the reference": 4 * SHARD}),
    ({**KL, "async_save": True, "ref_update_interval": 2}, {}, {"the reference": 8 * SHARD, WRITING: 4 * 8 * SHARD}),
]


@pytest.mark.parametrize(("options", "device", "host"), PARTS, ids=[str([*options]) for options, _, _ in PARTS])
def test_bytes_are_on_the_device_or_on_the_host(options, device, host):
    found = need(**options)
    assert found.device_parts == {name: size for name, size in {**ON_DEVICE, **device}.items() if size is not None}
    assert found.host_parts == host
    if not options:  # without a device
        assert need(supply=CPU).device == 0
        assert need(supply=CPU).host_parts == {name: 8 * size for name, size in ON_DEVICE.items()}


def test_a_checkpoint_in_writing_has_frozen_weights_without_moments() -> None:
    half_frozen = Shard.of(replace(COUNTS, frozen=COUNTS.total // 2), 8)  # e.g. a vision tower
    assert need(half_frozen, async_save=True).host_parts == {WRITING: 8 * SHARD + 2 * 8 * SHARD // 2}


ADAPTER = 40_000_000
ADAPTED = Shard.of(
    ParameterCounts(COUNTS.total + ADAPTER, 101_000_000, 400_000_000, COUNTS.total, 1_000_000, ADAPTER), 8
)


def test_only_an_adapter_has_moments_and_frozen_weights_have_the_compute_dtype():
    found = need(ADAPTED, **KL, lora_rank=8, ref_load="other")
    own = 4 * ADAPTER // 8
    assert found.device_parts == {
        "weights": own + SHARD // 2,
        "optimizer state": 2 * own,
        "gradients": own,
        "gathered layers": 2 * (2 * 101_000_000 + 400_000_000),
        "gradients of one layer": (2 + 4) * 1_000_000,
    }
    assert found.host_parts == {"the reference": 8 * SHARD // 2}
    assert need(ADAPTED, algorithm="grpo").device_parts["the engine's weights"] == 2 * COUNTS.total
    assert "4.04 B parameters (40.00 M of them trained) over 8 shards" in need_line(found, ADAPTED, GPU)


def test_quantized_weights_are_those_in_the_layers() -> None:
    found = need(ADAPTED, **SFT, lora_rank=8, load_in_4bit=True).device_parts
    inside, outside = COUNTS.total - 400_000_000, 400_000_000
    assert found["weights"] == 4 * ADAPTER // 8 + 0.5625 * inside // 8 + 2 * outside // 8
    assert found["gathered layers"] == 0.5625 * 2 * 101_000_000 + 2 * 400_000_000
    assert found["a dequantized weight"] == 2 * 101_000_000


def test_a_few_frozen_weights_of_a_stock_model_are_not_the_base_of_an_adapter():
    """Biases of routers, in some families: the engine and the reference still hold the whole model."""
    partly = need(Shard.of(replace(COUNTS, frozen=8), 8), algorithm="grpo", kl_loss_coef=0.1)
    assert partly.device_parts["weights"] == SHARD
    assert partly.device_parts["the engine's weights"] == 2 * COUNTS.total
    assert partly.host_parts == {"the reference": 8 * SHARD}


def test_the_line_gives_need_and_supply():
    assert need_line(need(), OF_8, GPU) == (
        "memory to load 4.00 B parameters over 8 shards, before activations: "
        "device 11.3 of 80.0 GiB free on each rank, host 0.0 of 500.0 GiB free for 8 ranks"
    )
    assert "device" not in need_line(need(), OF_8, CPU)


@pytest.mark.parametrize(
    ("options", "machine", "supply", "words"),
    [
        ({}, GPU, {"num_shards": 1, "device_free": 16, "ranks_per_node": 1}, "device memory .*--fsdp-cpu-offload"),
        ({}, GPU, {"device_free": 8}, r"16 shards \(--nproc-per-node"),
        ({"algorithm": "grpo"}, GPU, {"device_free": 12}, "--rollout-engine vllm-server --rollout-num-servers 1"),
        ({"fsdp_cpu_offload": True}, GPU, {"host_free": 40}, "host memory .*--no-fsdp-cpu-offload"),
        ({"load_strategy": "rank0"}, GPU, {"host_free": 9}, "--load-strategy shard"),
        (KL, GPU, {"host_free": 9}, "--kl-loss-coef 0"),
        ({}, GPU, {"num_shards": 1, "device_free": 24}, "--lora-rank 32"),
        ({}, CPU, {"host_free": 1}, "a smaller --hf-checkpoint"),
    ],
)
def test_a_demand_that_does_not_fit_is_one_line_with_a_fix(options, machine, supply, words):
    message = refusal(options, machine, supply)
    assert re.search(words, message), message
    assert "\n" not in message
    assert "--hf-checkpoint" in message


@pytest.mark.parametrize(
    ("options", "machine", "supply", "flag"),
    [
        ({**KL, "kl_reward_coef": 0.1}, GPU, {"host_free": 9}, "--kl-loss-coef"),  # the reward needs the reference
        (KL, GPU, {"device_free": 8}, "--kl-loss-coef"),  # the reference is on the host
        ({**KL, "fsdp_cpu_offload": True}, GPU, {"host_free": 77}, "--ref-dtype"),  # the policy would be stored twice
        ({"algorithm": "grpo"}, CPU, {"host_free": 20}, "--offload"),  # on CPUs everything is on the host
        ({"algorithm": "grpo"}, CPU, {"host_free": 20}, "--rollout-engine"),
        (
            {"algorithm": "grpo", "tensor_parallel_size": 2},
            GPU,
            {"num_shards": 1, "device_free": 24},
            "--lora-rank",
        ),  # not supported
    ],
)
def test_a_remedy_that_does_not_help_is_not_named(options, machine, supply, flag):
    assert flag not in refusal(options, machine, supply)


def refusal(options: dict[str, Any], machine: MemorySupply, supply: dict[str, int]) -> str:
    free = {name: value * GIB if name.endswith("_free") else value for name, value in supply.items()}
    shard = Shard.of(COUNTS, free.pop("num_shards", 8))
    with pytest.raises(MemoryPlanError) as caught:
        check_load_memory(config(**options), shard, replace(machine, **free))
    return str(caught.value)


def test_the_bound_is_exact():
    enough = need().device
    check_load_memory(config(), OF_8, replace(GPU, device_free=enough))
    with pytest.raises(MemoryPlanError):
        check_load_memory(config(), OF_8, replace(GPU, device_free=enough - 1))
    check_load_memory(config(bf16=False), Shard.of(count_parameters(zoo.build("llama")), 1), CPU)
