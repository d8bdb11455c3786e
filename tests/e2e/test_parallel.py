"""Tensor, expert and context parallelism by the real command line: the run without them is the reference."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import zoo
from tests.e2e import command
from tests.e2e.command import UNEVALUATED
from tests.matrix import only
from tests.testing import rank_variables

# old and reference logprobs, and a KL term
FLAGS = "--global-batch-size 8 --kl-loss-coef 0.1"
COMPARED = ("loss/total", "policy/entropy", "policy/ref_kl", "reward/mean", "optim/grad_norm", "progress/tokens")
SPLITS = {
    "tensor": ("qwen3", ["--tensor-parallel-size", "2"]),
    "experts": ("moe", ["--tensor-parallel-size", "2", "--expert-parallel-size", "2"]),
    # a sequence fits into the tokens of two GPUs only
    "context": ("qwen3", ["--context-parallel-size", "2", "--max-tokens-per-gpu", "40", "--gradient-checkpointing"]),
}


def trained(checkpoint: Path, folder: Path, *flags: str) -> list[dict[str, float]]:
    """The metrics of the rollouts of a run on two ranks."""
    argv = [
        "--hf-checkpoint",
        str(checkpoint),
        "--output-dir",
        str(folder / "run"),
        *UNEVALUATED,
        *FLAGS.split(),
        *flags,
    ]
    result = command.run(argv, folder, num_ranks=2)
    assert result.code == 0, result.err
    return command.trained(command.metrics_of(folder / "run"))


@pytest.mark.parametrize("split", only(["context"], SPLITS))
def test_a_split_run_trains_like_one_of_replicas_and_is_exported_by_one_process(
    checkpoint, moe, tmp_path, split
) -> None:
    family, flags = SPLITS[split]
    model = moe if family == "moe" else checkpoint
    plain = trained(model, tmp_path / "plain", "--fsdp-replicate-size", "2", "--no-export", "--keep-last", "0")
    found = trained(model, tmp_path / "split", *flags)
    assert len(plain) == len(found) == 2
    for wanted, row in zip(plain, found, strict=True):
        assert {n: row[n] for n in COMPARED} == pytest.approx({n: wanted[n] for n in COMPARED}, rel=1e-3, abs=1e-6)

    run = tmp_path / "split" / "run"
    argv = ["export", "--checkpoint", str(run / "checkpoints" / "step_00000002"), "--output", str(tmp_path / "hf")]
    result = command.run(argv, tmp_path)
    assert result.code == 0, result.err
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == (run / "hf" / "model.safetensors").read_bytes()


def dry_run(*flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "fsdptrain", "--hf-checkpoint", "X", "--dry-run", *flags]
    environment = os.environ | variables
    return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_dry_run_draws_the_processes() -> None:
    torchrun = {**rank_variables(0, 32, 29500), "LOCAL_WORLD_SIZE": "8"}
    done = dry_run("--tensor-parallel-size", "4", "--expert-parallel-size", "16", **torchrun)
    assert "32 processes = 1 replicas x 8 shards x 4 tensor" in done.stdout
    assert "tensor [0 1 2 3] [4 5 6 7] " in done.stdout
    assert "experts [0 1 2 3 ... 15] [16 17 18 19 ... 31]" in done.stdout
    context = ["--nproc-per-node", "8", "--context-parallel-size", "2", "--tensor-parallel-size"]
    done = dry_run(*context, "2")
    assert "8 processes = 1 replicas x 2 shards x 2 context x 2 tensor" in done.stdout
    assert "packs [0 1 2 3] [4 5 6 7]\ntensor [0 1] [2 3] [4 5] [6 7]\ncontext [0 2] [1 3] [4 6] [5 7]" in done.stdout
    for flags, line in (
        (
            [*context, "8"],
            "--tensor-parallel-size 8 x --context-parallel-size 2 must divide the processes of a replica, 8",
        ),
        (
            ["--nproc-per-node", "32", "--expert-parallel-size", "3"],
            "--expert-parallel-size 3 must divide the processes of a replica, 32",
        ),
    ):
        done = dry_run(*flags)
        assert done.returncode == 2
        assert line in done.stderr


REFUSED = {
    "heads": (
        *("qwen3", {"num_key_value_heads": 1}, ["--tensor-parallel-size", "2"]),
        "--tensor-parallel-size 2 must divide the 1 key-value heads of Qwen3ForCausalLM",
    ),
    "a state": (
        *("qwen3_next", {}, ["--context-parallel-size", "2"]),
        "--context-parallel-size 2: model.layers.0.linear_attn of Qwen3NextForCausalLM carries a state",
    ),
}


@pytest.mark.parametrize("case", only(["heads"], REFUSED))
def test_a_split_that_the_model_forbids_is_refused_before_weights_and_data_are_loaded(tmp_path, case) -> None:
    """The refusals themselves are tested on meta models, in tests/unit."""
    family, changes, flags, line = REFUSED[case]
    zoo.config(family, **changes).save_pretrained(tmp_path / "model")  # that is all there is
    argv = ["--hf-checkpoint", str(tmp_path / "model"), "--output-dir", str(tmp_path / "run"), "--prompt-data", "none"]
    result = command.run([*argv, *flags], tmp_path, num_ranks=2)
    assert result.code == 2
    assert result.err.startswith(f"fsdptrain: {line}")
    assert result.err.count("\n") == 1
