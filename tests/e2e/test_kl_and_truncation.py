"""A moving reference by the real command line."""

from pathlib import Path

import pytest
import torch

from tests.e2e import command
from tests.e2e.command import UNEVALUATED
from tests.e2e.command import trained as steps_of
from tests.e2e.test_train import learned, weights
from tests.testing import save_tiny_checkpoint


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_checkpoint(tmp_path_factory.mktemp("hub") / "reference", seed=5))


def test_a_run_with_a_moving_reference_resumes_bitwise(checkpoint: Path, reference: str, tmp_path: Path) -> None:
    """The stop comes one rollout after an update of the reference, so that neither side begins with it."""
    flags = ["--kl-loss-coef", "0.1", "--ref-update-interval", "2", "--ref-load", reference]
    flags += ["--save-interval", "3"]
    base = ["--hf-checkpoint", str(checkpoint), *UNEVALUATED, *flags]
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    for folder, length in ((whole, "5"), (halves, "3"), (halves, "5")):
        argv = [*base, "--output-dir", str(folder), "--num-rollout", length]
        result = command.run(argv, tmp_path / "out")
        assert result.code == 0, result.err
    rows = steps_of(learned(whole))
    assert steps_of(learned(halves)) == rows
    for ours, theirs in zip(weights(halves), weights(whole), strict=True):
        assert torch.equal(ours, theirs)
    for row in rows:
        assert row["loss/kl"] == pytest.approx(0.1 * row["policy/ref_kl"], rel=1e-4)
    assert rows[2]["policy/ref_kl"] < 0.1 * rows[1]["policy/ref_kl"]  # the policy has become the reference
