"""Each algorithm trains from the command line, with the loss of its preset."""

import math
from pathlib import Path

import pytest

from fsdptrain.config.presets import PRESETS
from tests.e2e import command
from tests.e2e.command import UNEVALUATED
from tests.matrix import only
from tests.testing import save_tiny_checkpoint

QUICKSTART = Path(__file__).parents[2] / "fsdptrain" / "recipes" / "spell_backward_demo.yaml"
QUICK = ["--num-rollout", "1", "--eval-interval", "0", "--keep-last", "0", "--no-export"]
TINY = [*UNEVALUATED, "--num-rollout", "1", "--keep-last", "0", "--no-export"]


@pytest.mark.parametrize("name", only(["dapo"], sorted(PRESETS)))
def test_the_quickstart_trains_with_every_algorithm(checkpoint: Path, tmp_path: Path, name: str) -> None:
    """The recipe tunes grpo; the algorithm of the flag overrides its loss options."""
    argv = ["--recipe", str(QUICKSTART), "--algorithm", name, *QUICK, "--log-to", "--global-batch-size", "16"]
    argv += ["--opd-teacher", str(save_tiny_checkpoint(tmp_path / "teacher", seed=1))] if name == "opd" else []
    if name != "sft":
        argv += ["--rollout-batch-size", "8", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "8"]
        argv += ["--reward", "tests.e2e.rewards:variety", "--reward-workers", "0"]
    metrics = command.train(checkpoint, tmp_path, *argv)[-1]
    assert metrics["optim/grad_norm"] > 0
    assert metrics["optim/skipped_steps"] == 0
    assert ("reward/overlong" in metrics) == (name == "dapo")


def test_truncated_responses_leave_the_loss_and_its_denominators_but_not_the_report(
    checkpoint: Path, tmp_path: Path
) -> None:
    """With an advantage of 1 for all remaining samples, the mean over tokens is 1 if no other token is counted."""
    flags = ["--rollout-max-response-len", "64", "--advantage-estimator", "tests.e2e.rewards:below_64_tokens"]
    flags += ["--advantage-scale", "batch", "--mask-truncated"]
    metrics = command.train(checkpoint, tmp_path, *TINY, *flags)[-1]
    assert 0 < metrics["completion/truncated_fraction"] < 1
    assert (metrics["progress/samples"], metrics["completion/length_max"]) == (16, 64)
    std = metrics["reward/std"] * math.sqrt(16 / 15)
    assert metrics["loss/policy"] == pytest.approx(-1 / std, rel=1e-5)


IDLE = [  # flags of features that compute a step without samples
    [],
    ["--context-parallel-size", "2"],
    ["--tensor-parallel-size", "2"],
    ["--lora-rank", "4", "--gradient-checkpointing", "--offload-activations"],
    ["--compile", "--fsdp-cpu-offload"],
]


@pytest.mark.parametrize("flags", only([[]], IDLE), ids=" ".join)
def test_a_run_without_any_advantage_skips_all_samples_and_has_no_means_over_them(
    checkpoint: Path, tmp_path: Path, flags: list[str]
) -> None:
    zeros = ["--kl-loss-coef", "0", "--advantage-estimator", "tests.e2e.rewards:zeros", "--advantage-scale", "none"]
    steps = ["--global-batch-size", "8", "--epochs-per-rollout", "2", "--mismatch-correction", "tis"]
    metrics = command.train(checkpoint, tmp_path, *TINY, *zeros, *steps, *flags, num_ranks=2)[-1]
    assert metrics["perf/skipped_tokens"] == 1
    assert metrics["optim/grad_norm"] == metrics["loss/total"] == 0
    assert not any(name.startswith(("policy/", "mismatch/")) for name in metrics)
    assert metrics["progress/samples"] == 16
