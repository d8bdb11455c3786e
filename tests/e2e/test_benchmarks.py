"""The benchmarks run from their first to their last line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_the_quick_run_warms_up_trains_and_reports(tmp_path: Path) -> None:
    argv = [
        sys.executable,
        FOLDER / "algorithms.py",
        "--quick",
        "--algorithms",
        "grpo",
        "--seeds",
        "7",
        "--folder",
        tmp_path,
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout.splitlines()[-1])
    assert (row["algorithm"], row["seed"], len(row["reward"])) == ("grpo", 7, 1)


@pytest.mark.slow
def test_the_quick_run_of_older_weights_trains_on_them(tmp_path: Path) -> None:
    argv = [sys.executable, FOLDER / "staleness.py", "--quick", "--engines", "hf", "--staleness", "1", "--seeds", "0"]
    done = subprocess.run([*argv, "--folder", tmp_path], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout.splitlines()[-1])
    assert (row["engine"], row["max_staleness"], row["staleness_max"]) == ("hf", 1, 1.0)
    assert 0 < row["seconds"]["train"] < row["seconds"]["step"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["throughput", "sync_check"])
def test_the_quick_runs_of_engines_report_the_embedded_one(name: str) -> None:
    argv = [sys.executable, FOLDER / f"{name}.py", "--quick", "--engines", "hf"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout.splitlines()[-1])
    assert row["engine"] == "hf"
    assert row.get("to_hf", 1.0) == 1.0
    assert 0 < row.get("share", 0.5) < 1


@pytest.mark.slow
def test_a_small_model_is_loaded_and_exported_within_its_bounds(tmp_path: Path) -> None:
    argv = [sys.executable, FOLDER / "saving_and_loading.py", "--quick", "--folder", tmp_path]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert all(report["laws"].values())
    assert len(done.stdout.splitlines()) == report["shape"]["ranks"] + 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_step_of_ours_agrees_with_one_of_trl(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="trl comes with the dev extra")
    argv = [sys.executable, FOLDER / "train_step.py", "--quick", "--lengths", "ragged", "--kl", "0.1"]
    argv += ["--sides", "ours", "stock", "--json", tmp_path / "report.json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["speedup_median"] > 0
    sides = report["results"][0]["sides"]
    assert sides["ours"]["computed_tokens"] < report["results"][0]["tokens"] <= sides["stock"]["computed_tokens"]


def test_the_packing_benchmark_runs() -> None:
    argv = [sys.executable, FOLDER / "packing.py", "--quick", "--sequences", "1000", "2000"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 6
    assert all(row["ours"]["imbalance"] < 0.02 for row in rows)
