"""Tensor, expert and context parallelism by the real command line: the run without them is the reference; replay."""

from pathlib import Path

import pytest

from tests import zoo
from tests.e2e import command
from tests.e2e.command import UNEVALUATED
from tests.matrix import only

KL = ["--global-batch-size", "8", "--kl-loss-coef", "0.1"]  # old and reference logprobs
COMPARED = ("loss/total", "policy/entropy", "policy/ref_kl", "reward/mean", "optim/grad_norm", "progress/tokens")
SPLITS = {
    "tensor": ("qwen3", ["--tensor-parallel-size", "2"]),
    "experts": ("moe", ["--tensor-parallel-size", "2", "--expert-parallel-size", "2"]),
    # a sequence fits into the tokens of two GPUs only
    "context": ("qwen3", ["--context-parallel-size", "2", "--max-tokens-per-gpu", "40", "--gradient-checkpointing"]),
}


def trained(checkpoint: Path, folder: Path, *flags: str) -> list[dict[str, float]]:
    """The metrics of the rollouts of a run on two ranks."""
    return command.trained(command.train(checkpoint, folder, *UNEVALUATED, *flags, num_ranks=2))


@pytest.mark.parametrize("split", only(["context"], SPLITS))
def test_a_split_run_trains_like_one_of_replicas_and_is_exported_by_one_process(
    checkpoint, moe, tmp_path, split
) -> None:
    family, flags = SPLITS[split]
    model = moe if family == "moe" else checkpoint
    plain = trained(model, tmp_path / "plain", *KL, "--fsdp-replicate-size", "2", "--no-export", "--keep-last", "0")
    found = trained(model, tmp_path / "split", *KL, *flags)
    assert len(plain) == len(found) == 2
    for wanted, row in zip(plain, found, strict=True):
        assert {n: row[n] for n in COMPARED} == pytest.approx({n: wanted[n] for n in COMPARED}, rel=1e-3, abs=1e-6)

    run = tmp_path / "split" / "run"
    argv = ["export", "--checkpoint", str(run / "checkpoints" / "step_00000002"), "--output", str(tmp_path / "hf")]
    result = command.run(argv, tmp_path)
    assert result.code == 0, result.err
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == (run / "hf" / "model.safetensors").read_bytes()


def test_routes_of_the_engine_on_two_ranks(moe: Path, tmp_path: Path) -> None:
    flags = ["--router-replay", "rollout", "--global-batch-size", "8", "--gradient-checkpointing", "--keep-last", "0"]
    rows = trained(moe, tmp_path, *flags)
    assert len(rows) == 2
    for row in rows:
        assert 1 <= row["moe/load_max"] <= 3  # E / k: all tokens choose it
        assert row["mismatch/abs_mean"] < 1e-4  # in float32 on the same weights and experts
        assert row["optim/skipped_steps"] == 0


def test_a_split_that_the_model_forbids_is_refused_before_weights_and_data_are_loaded(tmp_path: Path) -> None:
    """The refusals themselves, also of context parallelism, are tested on meta models, in tests/features."""
    zoo.config("qwen3", num_key_value_heads=1).save_pretrained(tmp_path / "model")  # that is all there is
    argv = ["--hf-checkpoint", str(tmp_path / "model"), "--output-dir", str(tmp_path / "run"), "--prompt-data", "none"]
    result = command.run([*argv, "--tensor-parallel-size", "2"], tmp_path, num_ranks=2)
    line = "fsdptrain: --tensor-parallel-size 2 must divide the 1 key-value heads of Qwen3ForCausalLM"
    assert (result.code, result.err[: len(line)], result.err.count("\n")) == (2, line, 1)
