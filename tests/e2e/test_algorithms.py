"""Each algorithm trains by the real command line, with the loss that its preset names."""

import json
from pathlib import Path

import pytest

from fsdptrain.config.presets import PRESETS
from tests.e2e import command
from tests.e2e.command import TINY_RUN

UNEVALUATED = [*TINY_RUN[: TINY_RUN.index("--eval-size")], *TINY_RUN[TINY_RUN.index("--eval-size") + 2 :]]
UNEVALUATED += ["--eval-interval", "0"]
TINY = [*UNEVALUATED, "--num-rollout", "1", "--keep-last", "0", "--no-export"]


def trained(checkpoint: Path, folder: Path, *flags: str) -> dict[str, float]:
    """The metrics of the one step of a run."""
    argv = ["--hf-checkpoint", str(checkpoint), "--output-dir", str(folder / "run"), *TINY, *flags]
    result = command.run(argv, folder)
    assert result.code == 0, result.err
    return json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(PRESETS) - {"sft", "grpo"}))  # these two have tests of their own
def test_every_algorithm_trains(checkpoint: Path, tmp_path: Path, name: str) -> None:
    metrics = trained(checkpoint, tmp_path, "--algorithm", name, "--global-batch-size", "8")
    assert metrics["optim/grad_norm"] > 0
    assert metrics["optim/skipped_steps"] == 0


@pytest.mark.slow
def test_batch_whitening_does_not_depend_on_the_number_of_ranks(checkpoint: Path, tmp_path: Path) -> None:
    flags = ["--algorithm", "reinforce++_baseline", "--nproc-per-node"]
    one, two = (trained(checkpoint, tmp_path / n, *flags, n) for n in ("1", "2"))
    for name in ("loss/total", "optim/grad_norm"):
        assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_several_epochs_of_several_steps_do_not_depend_on_the_number_of_ranks(checkpoint: Path, tmp_path: Path) -> None:
    flags = ["--steps-per-rollout", "6", "--epochs-per-rollout", "2", "--lr-decay-style", "linear", "--kl-loss-coef"]
    flags += ["0.1", "--nproc-per-node"]
    one, two = (trained(checkpoint, tmp_path / n, *flags, n) for n in ("1", "2"))
    assert one["optim/lr"] == two["optim/lr"] == pytest.approx(1e-3 * 1 / 6)
    assert one["policy/approx_kl"] > 0
    for name in ("loss/total", "loss/kl", "optim/grad_norm", "policy/approx_kl"):
        assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-6)


@pytest.mark.slow
def test_corrections_masks_and_the_unbiased_kl_report_what_they_did(checkpoint: Path, tmp_path: Path) -> None:
    flags = ["--algorithm", "gspo", "--global-batch-size", "8", "--use-opsm", "--mismatch-correction", "icepop"]
    metrics = trained(checkpoint, tmp_path, *flags, "--kl-loss-coef", "0.1", "--use-unbiased-kl")
    assert {"policy/opsm_fraction", "mismatch/out_of_bounds", "loss/kl"} <= metrics.keys()


@pytest.mark.slow
def test_a_loss_of_ones_own_is_used(checkpoint: Path, tmp_path: Path) -> None:
    own = trained(checkpoint, tmp_path / "own", "--loss", "tests.e2e.losses:doubled")
    plain = trained(checkpoint, tmp_path / "plain", "--loss", "reinforce")
    assert "policy/doubled" in own
    assert own["optim/grad_norm"] == pytest.approx(2 * plain["optim/grad_norm"], rel=1e-4)


@pytest.mark.slow
def test_a_loss_that_is_not_there_is_one_line(checkpoint: Path, tmp_path: Path) -> None:
    argv = ["--hf-checkpoint", str(checkpoint), "--output-dir", str(tmp_path / "run"), *TINY, "--loss", "tests.e2e:no"]
    result = command.run(argv, tmp_path)
    assert result.code == 2
    assert "--loss tests.e2e:no" in result.err.splitlines()[-1]
