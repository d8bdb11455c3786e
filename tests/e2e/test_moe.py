"""A mixture of experts by the real command line: the router's loss, and the engine's routes in training."""

from pathlib import Path

import pytest

from tests.e2e import command
from tests.e2e.command import UNEVALUATED, metrics_of

TINY = [*UNEVALUATED, "--keep-last", "0"]


def trained(checkpoint: Path, folder: Path, *flags: str) -> list[dict[str, float]]:
    """The metrics of a run on two ranks."""
    argv = ["--hf-checkpoint", str(checkpoint), "--output-dir", str(folder / "run"), *TINY, *flags]
    result = command.run(argv, folder, num_ranks=2)
    assert result.code == 0, result.err
    return metrics_of(folder / "run")


def test_routes_of_the_engine_and_the_loss_of_the_router_on_two_ranks(moe: Path, tmp_path: Path) -> None:
    flags = ["--router-replay", "rollout", "--router-aux-loss-coef", "config"]
    rows = trained(moe, tmp_path, *flags, "--global-batch-size", "8", "--gradient-checkpointing")
    assert len(rows) == 2
    for row in rows:
        assert row["loss/router"] == pytest.approx(0.02 * row["moe/aux_loss"], rel=1e-4)
        assert 1.9 < row["moe/aux_loss"] <= 6  # k is balanced, E the most
        assert 1 <= row["moe/load_max"] <= 3  # E / k: all tokens choose it
        assert row["mismatch/abs_mean"] < 1e-4  # in float32 on the same weights and experts
        assert row["optim/skipped_steps"] == 0
