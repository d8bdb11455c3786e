"""Every benchmark runs to its end with --quick."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.matrix


def benchmark(name: str, *flags: str | Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, FOLDER / name, *flags]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done


def run_quick(name: str, folder: Path, *flags: str) -> dict[str, Any]:
    """Return the report of a benchmark with --quick."""
    target = folder / "report.json"
    (folder / "scratch").mkdir(exist_ok=True)
    benchmark(name, "--quick", "--json", target, *flags)
    report = json.loads(target.read_text())
    assert {"command", "commit", "machine", "versions"} <= report.keys()
    return report


def test_the_quick_run_of_engines_reports_the_embedded_one() -> None:
    row = json.loads(benchmark("throughput.py", "--quick", "--engines", "hf").stdout.splitlines()[-1])
    assert row["engine"] == "hf"
    assert row["to_hf"] == {"median": 1.0, "least": 1.0, "most": 1.0}


def test_mfu_makes_a_row_for_each_case_and_says_what_failed(tmp_path: Path) -> None:
    chosen = ["--kinds", "grpo", "--adapters", "full", "--variants", "A", "flash-attn 2"]
    plain, flash = run_quick("mfu.py", tmp_path, *chosen)["results"]
    assert 0 < plain["mfu_causal"]["median"] < plain["mfu"]["median"]
    assert "ConfigError: attn_implementation flash_attention_2 needs a GPU" in flash["failed"]


def test_the_packing_benchmark_runs() -> None:
    *rows, end = [json.loads(line) for line in benchmark("packing.py", "--quick").stdout.splitlines()]
    assert len(rows) == 6
    assert all(row["ours"]["imbalance"] < 0.02 for row in rows)
    assert all(row["first-fit"]["times_ours"]["least"] > 0 for row in rows)
    assert end["laws"] == {"fill above 97 %": True, "imbalance below 2 %": True}  # what these sizes can show


@pytest.mark.usefixtures("real_model")
def test_sides_of_the_real_model_train_the_same_and_alternate(tmp_path: Path) -> None:
    rows = run_quick("real_model.py", tmp_path, "--cases", "kl", "sft")["results"]
    assert [(row["case"], row["side"]) for row in rows] == [(c, s) for c in ("kl", "sft") for s in ("ours", "trl")]
    assert all(row["times_ours"]["least"] > 0 and len(row["steps"]) == 2 for row in rows)
