"""A mixture of experts by the real command line: the engine's routes in training."""

from pathlib import Path

from tests.e2e import command
from tests.e2e.command import UNEVALUATED, metrics_of

TINY = [*UNEVALUATED, "--keep-last", "0"]


def trained(checkpoint: Path, folder: Path, *flags: str) -> list[dict[str, float]]:
    """The metrics of a run on two ranks."""
    argv = ["--hf-checkpoint", str(checkpoint), "--output-dir", str(folder / "run"), *TINY, *flags]
    result = command.run(argv, folder, num_ranks=2)
    assert result.code == 0, result.err
    return metrics_of(folder / "run")


def test_routes_of_the_engine_on_two_ranks(moe: Path, tmp_path: Path) -> None:
    rows = trained(moe, tmp_path, "--router-replay", "rollout", "--global-batch-size", "8", "--gradient-checkpointing")
    assert len(rows) == 2
    for row in rows:
        assert 1 <= row["moe/load_max"] <= 3  # E / k: all tokens choose it
        assert row["mismatch/abs_mean"] < 1e-4  # in float32 on the same weights and experts
        assert row["optim/skipped_steps"] == 0
