"""A GPU computes the results of a CPU: three optimizer steps with each option, on one rank with the device's backend.

Written on machines without a GPU: `make gpu` runs them on one, `make test-null-gpu` without one (tests/null_gpu).
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from fsdptrain import Trainer
from fsdptrain.fsdp.checkpoint_folder import CheckpointFolder
from fsdptrain.platform import has_accelerator
from tests.testing import allocated_on_device, save_tiny_checkpoint, spawn, tiny_run

from . import gpu_cases
from .sharded import full_state

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_accelerator(), reason="needs a GPU")]

ROOT = Path(__file__).parents[2]
EXACT: dict[str, dict[str, Any]] = {
    "plain": {},
    "parameters on the host": {"fsdp_cpu_offload": True},
    "optimizer on the host": {"offload_optimizer": True},
    "inputs of layers on the host": {"offload_activations": True, "gradient_checkpointing": True},
    "checkpointing": {"gradient_checkpointing": True},
    "compile": {"compile": True},
    "compile and checkpointing": {"compile": True, "gradient_checkpointing": True},
    "no resharding": {"fsdp_reshard_after_forward": False},
}
HALF: dict[str, dict[str, Any]] = {
    "bf16, varlen": {"bf16": True, "attn_implementation": "varlen"},
    "bf16, by segments": {"bf16": True, "attn_implementation": "sdpa"},
    "bf16, several chunks of the head": {"bf16": True, "logprob_chunk_size": 16},
    "bf16, checkpointing": {"bf16": True, "gradient_checkpointing": True},
    "bf16, compile": {"bf16": True, "compile": True},
    "bf16, parameters on the host": {"bf16": True, "fsdp_cpu_offload": True},
    "fp16 with its loss scale": {"fp16": True},
}
if find_spec("liger_kernel") is not None:
    EXACT |= {"liger": {"liger": True}}
    HALF |= {"bf16, liger": {"bf16": True, "liger": True}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_checkpoint(tmp_path_factory.mktemp("qwen3"), **gpu_cases.WORD_LAYERS))


@pytest.fixture(scope="module")
def on_cpu(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    target = tmp_path_factory.mktemp("cpu") / "steps.pt"
    argv = [sys.executable, "-m", "tests.distributed.gpu_cases", checkpoint, str(target)]
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(argv, cwd=ROOT, env=variables, check=True, timeout=300)
    return torch.load(target, weights_only=False)


def on_device(checkpoint: str, values: dict[str, Any]) -> dict[str, Any]:
    [found] = spawn(1, gpu_cases.train, checkpoint, values, timeout=300.0)
    assert found["device"] != "cpu"
    assert dist.get_default_backend_for_device(found["device"]) in found["backends"]
    return found


@pytest.mark.parametrize("name", EXACT)
def test_in_float32_steps_are_those_of_a_cpu(name: str, checkpoint: str, on_cpu: dict[str, Any]) -> None:
    found = on_device(checkpoint, EXACT[name])
    assert found["fused"]
    for ours, wanted in zip(found["history"], on_cpu["history"], strict=True):
        assert ours["optim/grad_norm"] == pytest.approx(wanted["optim/grad_norm"], rel=1e-3)
        assert ours["loss/total"] == pytest.approx(wanted["loss/total"], rel=1e-3, abs=1e-4)
    for key, weight in found["weights"].items():
        torch.testing.assert_close(weight, on_cpu["weights"][key], rtol=1e-3, atol=1e-4, msg=lambda m, key=key: key + m)


@pytest.mark.parametrize("name", HALF)
def test_in_half_precision_steps_are_near_those_of_a_cpu(name: str, checkpoint: str, on_cpu: dict[str, Any]) -> None:
    """Norms and losses agree within 8-bit rounding; fp16 may skip steps while its loss scale adapts."""
    found = on_device(checkpoint, HALF[name])
    trained = [step for step in found["history"] if "optim/grad_norm" in step]
    assert trained or name.startswith("fp16")
    if len(trained) == gpu_cases.NUM_STEPS:
        for ours, wanted in zip(trained, on_cpu["history"], strict=True):
            assert ours["optim/grad_norm"] == pytest.approx(wanted["optim/grad_norm"], rel=0.1)
            assert ours["loss/total"] == pytest.approx(wanted["loss/total"], abs=0.05)
    assert all(weight.isfinite().all() for weight in found["weights"].values())


def saved_and_exported(checkpoint: str, folder: Path) -> tuple[dict, dict, dict, int, int]:
    """Weights of a run, of its resumed run and of its export; bytes on the device while it is offloaded."""
    backend = gpu_cases.make(checkpoint, {})
    gpu_cases.steps(backend)
    CheckpointFolder(folder / "run", keep_last=1, timeout_s=60).write(1, lambda at: backend.save(at, 1))
    backend.export(folder / "hf")
    before = allocated_on_device()
    backend.offload()
    away = allocated_on_device()
    backend.onload()
    exported = full_state(backend.model)
    _, went_on = gpu_cases.steps(backend)
    other = gpu_cases.make(checkpoint, {})
    [saved] = (folder / "run").glob("**/step_*")
    other.load(saved)
    _, resumed = gpu_cases.steps(other)
    return went_on, resumed, {name: tensor.cpu() for name, tensor in exported.items()}, before, away


def test_checkpoints_exports_and_offloading_lose_nothing(checkpoint: str, tmp_path: Path) -> None:
    [(went_on, resumed, exported, before, away)] = spawn(1, saved_and_exported, checkpoint, tmp_path, timeout=300.0)
    for name, weight in went_on.items():
        torch.testing.assert_close(resumed[name], weight, rtol=1e-6, atol=1e-7)
    assert away < before / 2
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.data, exported[name], rtol=0, atol=0)


RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16, the engine alone on the device": {"bf16": True, "offload_train": True, "kl_loss_coef": 0.1},
    "parameters on the host": {"fsdp_cpu_offload": True, "kl_loss_coef": 0.1, "global_batch_size": 8},
    "optimizer and checkpoints on the host": {"offload_optimizer": True, "save_interval": 1, "async_save": True},
}


def run(checkpoint: str, folder: Path, values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the metrics of two rollouts with the embedded engine, with an evaluation after each, and an export."""
    options = {"num_rollout": 2, "rollout_batch_size": 4, "n_samples_per_prompt": 4, "rollout_max_response_len": 8}
    options |= {"max_tokens_per_gpu": 128, "reward": "tests.e2e.rewards:variety", "lr": 1e-3, "export": True}
    options |= {"eval_size": 2, "eval_interval": 1, "rollout_engine": "hf"}
    rows = [{"prompt": f"say {i}", "label": str(i)} for i in range(16)]
    Trainer(tiny_run(checkpoint, folder, **options | values), dataset=rows).fit()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_a_device_trains_and_its_engine_agrees(name: str, checkpoint: str, tmp_path: Path) -> None:
    [rows] = spawn(1, run, checkpoint, tmp_path / "run", RUNS[name], timeout=300.0)
    trained = [row for row in rows if "loss/total" in row]
    assert len(trained) == 2
    assert all(row["optim/grad_norm"] > 0 for row in trained)
    agreement = [row["mismatch/abs_mean"] for row in trained]
    assert agreement
    assert max(agreement) < (1e-2 if RUNS[name].get("bf16") else 1e-4)
    assert list((tmp_path / "run" / "hf").glob("*.safetensors"))
