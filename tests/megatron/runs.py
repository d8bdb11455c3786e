"""The metrics of runs by the real command line, and when those of two are the same."""

import json
from pathlib import Path

import pytest

from tests.e2e import command


def metrics(argv: list[str], folder: Path, *, num_ranks: int = 1, timeout: float = 600.0) -> list[dict[str, float]]:
    """Of the rollouts of `fsdptrain *argv`, which writes into `folder`/run."""
    result = command.run([*argv, "--output-dir", str(folder / "run")], folder, timeout, num_ranks=num_ranks)
    assert result.code == 0, result.err
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss/total" in row]


def assert_same(
    found: list[dict[str, float]], wanted: list[dict[str, float]], *, rel: float = 1e-4, abs: float = 1e-6
) -> None:
    """Up to the rounding of float32, but for times."""
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        names = [name for name in theirs if not name.startswith(("perf/", "weight_sync/", "time"))]
        assert {n: ours[n] for n in names} == pytest.approx({n: theirs[n] for n in names}, rel=rel, abs=abs)
