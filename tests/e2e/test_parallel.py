"""Tensor and expert parallel by the real command line: a run learns what it learns without them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import Qwen3MoeForCausalLM

from fsdptrain.testing import rank_variables, tiny_tokenizer
from tests import zoo
from tests.e2e import command
from tests.e2e.command import TINY_RUN

# two epochs, old and reference logprobs, and a KL term that travels between the owners of samples and their packs
FLAGS = "--steps-per-rollout 4 --epochs-per-rollout 2 --kl-reward-coef 0.1 --save-interval 1"
COMPARED = ("loss/total", "policy/entropy", "policy/ref_kl", "reward/mean", "optim/grad_norm", "progress/tokens")


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "moe"
    model = zoo.build("qwen3_moe")
    assert isinstance(model, Qwen3MoeForCausalLM)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def trained(checkpoint: Path, folder: Path, *flags: str) -> list[dict[str, float]]:
    """The metrics of the rollouts of a run on two ranks."""
    argv = ["--hf-checkpoint", str(checkpoint), "--output-dir", str(folder / "run"), *TINY_RUN, *FLAGS.split(), *flags]
    result = command.run(argv, folder, num_ranks=2)
    assert result.code == 0, result.err
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss/total" in row]


@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("qwen3", ["--tensor-parallel-size", "2"]),
        ("moe", ["--tensor-parallel-size", "2", "--expert-parallel-size", "2"]),
        # a sequence fits into the tokens of two GPUs only
        ("qwen3", ["--context-parallel-size", "2", "--max-tokens-per-gpu", "40", "--gradient-checkpointing"]),
    ],
)
def test_a_run_learns_what_it_learns_without(checkpoint, moe, tmp_path, family, flags) -> None:
    model = moe if family == "moe" else checkpoint
    plain, split = trained(model, tmp_path / "plain"), trained(model, tmp_path / "split", *flags)
    assert len(plain) == len(split) == 2
    for wanted, found in zip(plain, split, strict=True):
        assert {n: found[n] for n in COMPARED} == pytest.approx({n: wanted[n] for n in COMPARED}, rel=1e-3, abs=1e-6)


def test_a_run_that_changes_its_mesh_goes_on(moe, tmp_path) -> None:
    trained(moe, tmp_path, "--expert-parallel-size", "2")
    rows = trained(moe, tmp_path, "--num-rollout", "3")
    assert len(rows) == 3


def test_a_checkpoint_of_a_split_run_is_exported_by_one_process(checkpoint, tmp_path) -> None:
    trained(checkpoint, tmp_path, "--context-parallel-size", "2", "--max-tokens-per-gpu", "40")
    argv = ["export", "--checkpoint", str(tmp_path / "run" / "checkpoints" / "step_00000002")]
    result = command.run([*argv, "--output", str(tmp_path / "hf")], tmp_path)
    assert result.code == 0, result.err
    found, wanted = (tmp_path / name / "model.safetensors" for name in ("hf", "run/hf"))
    assert found.read_bytes() == wanted.read_bytes()


def test_dry_run_draws_the_processes_and_refuses_what_does_not_fit() -> None:
    flags = "--hf-checkpoint X --dry-run --tensor-parallel-size 4"
    program = [sys.executable, "-m", "fsdptrain", *flags.split(), "--expert-parallel-size", "16"]
    torchrun = {**os.environ, **rank_variables(0, 32, 29500), "LOCAL_WORLD_SIZE": "8"}
    done = subprocess.run(program, env=torchrun, capture_output=True, text=True, timeout=60, check=True)
    assert "# 32 processes = 1 replicas x 8 shards x 4 tensor" in done.stdout
    assert "# tensor [0 1 2 3] [4 5 6 7] " in done.stdout
    assert "# experts [0 1 2 3 ... 15] [16 17 18 19 ... 31]" in done.stdout
    assert "# --expert-parallel-size 16: its groups do not lie within a node of 8 processes" in done.stdout
    assert "# --tensor-parallel-size" not in done.stdout
    program = [*program[:-1], "3", "--nproc-per-node", "32"]
    refused = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2
    assert "--expert-parallel-size 3 must divide the processes of a replica, 32" in refused.stderr


def test_dry_run_draws_which_processes_share_packs() -> None:
    flags = "--hf-checkpoint X --dry-run --nproc-per-node 8 --context-parallel-size 2"
    program = [sys.executable, "-m", "fsdptrain", *flags.split(), "--tensor-parallel-size"]
    done = subprocess.run([*program, "2"], capture_output=True, text=True, timeout=60, check=True)
    assert "# 8 processes = 1 replicas x 2 shards x 2 context x 2 tensor" in done.stdout
    assert (
        "# packs [0 1 2 3] [4 5 6 7]\n# tensor [0 1] [2 3] [4 5] [6 7]\n# context [0 2] [1 3] [4 6] [5 7]"
        in done.stdout
    )
    refused = subprocess.run([*program, "8"], capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2
    wanted = "--tensor-parallel-size 8 x --context-parallel-size 2 must divide the processes of a replica, 8"
    assert wanted in refused.stderr


REFUSED = {
    "fewer experts than ranks": (
        *("qwen3_moe", {"num_experts": 1, "num_experts_per_tok": 1}, ["--expert-parallel-size", "2"]),
        "--expert-parallel-size 2 is more than the 1 experts of Qwen3MoeForCausalLM",
    ),
    "heads": (
        *("qwen3", {"num_key_value_heads": 1}, ["--tensor-parallel-size", "2"]),
        "--tensor-parallel-size 2 must divide the 1 key-value heads of Qwen3ForCausalLM",
    ),
    "a state": (
        *("qwen3_next", {}, ["--context-parallel-size", "2"]),
        "--context-parallel-size 2: model.layers.0.linear_attn of Qwen3NextForCausalLM carries a state",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_model_does_not_allow_is_one_line_before_weights_and_data_are_looked_for(tmp_path, case) -> None:
    family, changes, flags, line = REFUSED[case]
    zoo.config(family, **changes).save_pretrained(tmp_path / "model")  # that is all there is
    argv = ["--hf-checkpoint", str(tmp_path / "model"), "--output-dir", str(tmp_path / "run"), "--prompt-data", "none"]
    result = command.run([*argv, *flags], tmp_path, num_ranks=2)
    assert result.code == 2
    assert result.err.startswith(f"fsdptrain: {line}")
    assert result.err.count("\n") == 1


def test_a_dry_run_with_a_probe_asks_the_model_too(tmp_path) -> None:
    zoo.config("gpt_oss").save_pretrained(tmp_path / "model")
    argv = ["--hf-checkpoint", str(tmp_path / "model"), "--dry-run", "--probe", "--nproc-per-node", "8"]
    result = command.run([*argv, "--expert-parallel-size", "8"], tmp_path)
    assert result.code == 2
    assert "--expert-parallel-size 8 is more than the 4 experts of GptOssForCausalLM" in result.err
