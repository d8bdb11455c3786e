"""The benchmark of the algorithms runs from its first to its last line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "algorithms.py"


@pytest.mark.slow
def test_the_quick_run_warms_up_trains_and_reports(tmp_path: Path) -> None:
    argv = [sys.executable, SCRIPT, "--quick", "--algorithms", "grpo", "--seeds", "7", "--folder", tmp_path]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout.splitlines()[-1])
    assert (row["algorithm"], row["seed"], len(row["reward"])) == ("grpo", 7, 1)
