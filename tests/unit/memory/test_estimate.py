"""The memory estimate against counts by hand, and the FLOPs of perf/mfu against what torch counts."""

import logging
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.errors import MemoryPlanError
from fsdptrain.memory import report
from fsdptrain.memory.advice import flags_that_help
from fsdptrain.memory.estimate import GIB, Estimate, Machine, Parts, count_parameters, estimate, size_of
from fsdptrain.memory.report import MemoryReport
from fsdptrain.trainer.speed import ModelFlops, model_flops
from tests import configs, families, zoo

MODEL = configs.meta_model("llama-3.1-8b")
TOTAL = count_parameters(MODEL)[0]
MACHINE = Machine(8, device=80 * GIB)
SFT = {"algorithm": "sft", "eval_interval": 0}
KL = {"kl_loss_coef": 0.1, "rollout_engine": "vllm-server", "rollout_num_servers": 1}
FULL = {"gradient_checkpointing": True}


def config(**options: Any) -> Config:
    return Config(**{"hf_checkpoint": "a model", **options})


def need(machine: Machine = MACHINE, **options: Any) -> Estimate:
    return estimate(MODEL, config(**options), machine)


def state(parts: Parts) -> list[int | None]:
    return [parts.get(name) for name in ("weights", "optimizer state", "gradients")]


def test_state_is_16_bytes_per_parameter_of_a_shard_and_moves_to_the_host():
    shard = 4 * TOTAL // 8
    assert state(need().training) == [shard, 2 * shard, shard]
    assert state(need(offload_optimizer=True).training) == [shard, None, shard]
    assert state(need(fsdp_cpu_offload=True).training) == [None, None, None]
    assert state(need(optimizer="sgd").training) == [shard, 0, shard]
    half = need(bf16=False).training["gathered layers"]
    assert need().training["gathered layers"] == half // 2
    assert need(fsdp_reshard_after_forward=False).training["gathered layers"] == 2 * TOTAL


def test_pinned_buffers_are_powers_of_two_and_those_of_a_cpu_are_not():
    pinned, plain = (
        need(Machine(8, has_accelerator=on), fsdp_cpu_offload=True).on_host["weights"] for on in (True, False)
    )
    sizes = [4 * (-(-p.shape[0] // 8)) * (p.numel() // p.shape[0]) for p in MODEL.parameters()]
    assert plain == 8 * sum(sizes)
    assert pinned == 8 * sum(1 << (size - 1).bit_length() for size in sizes)
    assert need(Machine(8, has_accelerator=False)).device == 0


@pytest.mark.parametrize(
    ("options", "parts"),
    [({**KL}, {"the reference": 4}), ({**SFT, "async_save": True}, {"the checkpoint in writing": 12})],
)
def test_copies_on_the_host(options: dict[str, Any], parts: dict[str, int]):
    found = need(Machine(8, has_accelerator=False), **options).on_host
    assert found == {name: width * TOTAL for name, width in parts.items()}


def test_the_engine_in_the_process_holds_a_copy_and_a_cache_without_gradients():
    found = need(rollout_engine="hf", rollout_max_prompt_len=1024, rollout_max_response_len=1024).generation
    assert found["the engine's weights"] == 2 * TOTAL
    assert found["key-value cache"] == 32 * 2048 * 32 * 8 * 2 * 128 * 2  # rows, tokens, layers, heads, k and v, width
    assert "gradients" not in found
    assert need(**KL).generation == need(**SFT).generation == {}
    split = {"rollout_engine": "vllm", "rollout_kv_cache_gib": 8, "rollout_engine_args": {"tensor_parallel_size": 2}}
    assert need(**split).generation["the engine's weights"] == TOTAL
    assert need(**split).generation["key-value cache"] == 8 * GIB


def test_an_adapter_has_moments_of_its_own_and_frozen_weights_have_the_compute_dtype():
    model, lora = zoo.build("qwen3", hidden_size=256, intermediate_size=512), {"lora_rank": 4}
    base = count_parameters(model)[0]
    for name, parameter in list(model.named_parameters()):
        parameter.requires_grad_(False)
        if name.endswith("q_proj.weight"):
            model.get_submodule(name.rpartition(".")[0]).register_module("lora_A", torch.nn.Linear(256, 4, bias=False))
    adapter = count_parameters(model)[0] - base
    found = estimate(model, config(**SFT, **lora), Machine(1)).training
    assert state(found) == [2 * base + 4 * adapter, 8 * adapter, 4 * adapter]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "gpt_oss"])
def test_each_step_of_recomputing_keeps_less(name: str):
    model = zoo.build(name)
    options: list[dict[str, Any]] = [{}, {**FULL}, {**FULL, "offload_activations": True}]
    found = [estimate(model, config(**SFT, **x), Machine(1)).training["activations"] for x in options]
    assert found == sorted(found, reverse=True)
    half = config(**SFT, max_tokens_per_gpu=4096)
    assert estimate(model, half, Machine(1)).training["activations"] == found[0] // 2


def test_each_named_flag_takes_less_and_states_what_is_needed_then():
    small = Machine(2, device=40 * GIB)
    given = need(small, **FULL)
    flags = flags_that_help(MODEL, config(**FULL), small)
    assert given.lacks == "device"
    assert any(line.startswith("--fsdp-cpu-offload (") for line in flags)
    for line in flags:
        words, size = line.removesuffix(" GiB)").rsplit(" (", 1)
        assert float(size) < given.device / GIB
        assert words.startswith("--")
    by_number = [need(Machine(n)).device for n in (1, 2, 8, 64)]
    assert by_number == sorted(by_number, reverse=True)


def test_a_run_that_does_not_fit_says_so_in_one_line_and_goes_on_except_with_strict(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(report, "host_memory", lambda: (GIB, GIB))
    given = config(**SFT)
    with platform.process_group(60), caplog.at_level(logging.INFO):
        memory = MemoryReport(given)
        memory.before_load(MODEL)
        info, warning = caplog.messages
        with pytest.raises(MemoryPlanError, match="--strict: this run may not fit"):
            MemoryReport(given.with_values(strict=True)).before_load(MODEL)
        with (
            pytest.raises(MemoryPlanError, match=r"out of memory: CUDA.*--gradient-checkpointing"),
            memory.naming_flags(),
        ):
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried")
    assert info.startswith("planned memory of 8.03 B parameters: ")
    assert "of 1.0 GiB on the host" in warning
    assert "--gradient-checkpointing (" in warning
    assert "\n" not in warning


def test_a_run_that_fits_logs_one_line(caplog: pytest.LogCaptureFixture):
    model = zoo.build("llama")
    with platform.process_group(60), caplog.at_level(logging.INFO):
        MemoryReport(config(**SFT, max_tokens_per_gpu=64)).before_load(model)
    assert len(caplog.messages) == 1
    assert size_of(estimate(model, config(**SFT), Machine(1)).training) > 0


LENGTH = 64


@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "gpt2", "gemma3", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "ernie4_5_moe"]
)
def test_flops_of_a_forward_pass_are_those_that_torch_counts(name: str) -> None:
    chosen = families.tiny_config(name)  # ernie names its experts otherwise than most: moe_k of moe_num_experts
    chosen._experts_implementation = "eager"  # one product for each expert, all of them counted
    model = AutoModelForCausalLM.from_config(chosen, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(5, 5 + LENGTH)[None], use_cache=False)
    counted = model_flops(model).forward([LENGTH], LENGTH, causal=False)
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.01)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_shared_prompt_counts_once_and_its_keys_for_each_response(frozen: bool) -> None:
    flops = ModelFlops(body_weights=7.0, head_weights=11, attention_width=3, frozen=frozen)
    whole = flops.training([10, 12], 5, causal=True)
    shared = flops.training([10, 12], 5, causal=True, prefixes=[0, 4])
    assert whole - shared == pytest.approx(flops.training([4], 0, causal=True))
    pairs = flops.forward([12], 0, causal=False, prefixes=[4]) - 2 * 7.0 * 8
    assert pairs == pytest.approx(4 * 3 * 8 * 12)
