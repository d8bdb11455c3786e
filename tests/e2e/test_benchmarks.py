"""Every benchmark runs to its end with --quick."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.matrix


def benchmark(
    name: str, *flags: str | Path, timeout: float = 300, code: int = 0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the benchmark `name`, which must end with `code`."""
    argv = [sys.executable, FOLDER / name, *flags]
    environment = os.environ | variables
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == code, done.stderr
    return done


def last_row(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    return json.loads(done.stdout.splitlines()[-1])


def run_quick(name: str, folder: Path, *flags: str, timeout: float = 300) -> dict[str, Any]:
    """Return the report of a benchmark with --quick."""
    target = folder / "report.json"
    (folder / "scratch").mkdir(exist_ok=True)
    benchmark(name, "--quick", "--json", target, *flags, timeout=timeout)
    report = json.loads(target.read_text())
    assert {"command", "commit", "machine", "versions"} <= report.keys()
    return report


def test_the_quick_run_of_an_algorithm_warms_up_trains_and_reports(tmp_path: Path) -> None:
    row = last_row(benchmark("algorithms.py", "--quick", "--algorithms", "grpo", "--seeds", "7", "--folder", tmp_path))
    assert (row["algorithm"], row["seed"], len(row["reward"])) == ("grpo", 7, 1)


def test_the_quick_run_of_older_weights_trains_on_them(tmp_path: Path) -> None:
    flags = ["--engines", "hf", "--staleness", "1", "--seeds", "0"]
    row = last_row(benchmark("staleness.py", "--quick", *flags, "--folder", tmp_path))
    assert (row["engine"], row["max_staleness"], row["staleness_max"]) == ("hf", 1, 1.0)
    assert 0 < row["seconds"]["train"] < row["seconds"]["step"]


@pytest.mark.parametrize("name", ["throughput", "sync_check"])
def test_the_quick_runs_of_engines_report_the_embedded_one(name: str) -> None:
    more = ["--staleness", "1"] if name == "sync_check" else []
    row = last_row(benchmark(f"{name}.py", "--quick", "--engines", "hf", *more))
    assert row["engine"] == "hf"
    ratio = row["to_hf" if name == "throughput" else "share"]
    assert 0 < ratio["least"] <= ratio["median"] <= ratio["most"] <= 1


def test_a_small_model_is_loaded_in_every_way_and_exported_within_its_bounds(tmp_path: Path) -> None:
    report = run_quick("load.py", tmp_path, "--folder", str(tmp_path / "scratch"))
    assert all(report["laws"].values())
    assert {(row["ranks"], row["way"]) for row in report["results"]} >= {(2, "shard"), (2, "slime"), (2, "bytes")}
    assert not list((tmp_path / "scratch").iterdir())


def test_the_embedded_engine_and_generate_are_timed_in_turn(tmp_path: Path) -> None:
    rows = run_quick("rollout.py", tmp_path, "--samples", "2", "--max-tokens", "8")["results"]
    assert [row["case"] for row in rows] == ["equal", "mixed"]
    for row in rows:
        assert row["speedup_wall"]["least"] > 0
        assert [len(row["runs"][side]) for side in ("engine", "generate")] == [2, 2]


def test_mfu_makes_a_row_for_each_case_and_says_what_failed(tmp_path: Path) -> None:
    chosen = ["--kinds", "grpo", "--adapters", "full", "--variants", "A", "flash-attn 2"]
    plain, flash = run_quick("mfu.py", tmp_path, *chosen)["results"]
    assert 0 < plain["mfu_causal"]["median"] < plain["mfu"]["median"]
    assert "ConfigError: --attn-implementation flash_attention_2" in flash["failed"]


def test_mfu_without_a_gpu_is_refused() -> None:
    assert "this machine has no GPU" in benchmark("mfu.py", code=1, CUDA_VISIBLE_DEVICES="").stderr


def test_ranks_send_what_is_planned_and_more_gpus_are_modelled(tmp_path: Path) -> None:
    report = run_quick("scaling.py", tmp_path)
    one, two = report["measured"]
    assert (one["ranks"], two["ranks"]) == (1, 2)
    assert two["gathered_mb"] > 0
    weak = {row["gpus"]: row for row in report["model"] if (row["mesh"], row["scaling"]) == ("FSDP", "weak")}
    assert weak[8]["no overlap"] > weak[4096]["no overlap"]
    assert (tmp_path / "report.png").stat().st_size > 1000


def test_the_quick_run_of_a_weight_sync_times_every_stage(tmp_path: Path) -> None:
    [row] = run_quick("weight_sync.py", tmp_path)["results"]
    assert set(row["copies"]) == {"copy", "hf", "checksums", "files", "deltas", "apply"}
    assert row["copies"]["copy"] == 1.0
    assert all(spread["median"] > 0 for spread in row["seconds"].values())
    assert 0 < row["bytes of deltas"] < 0.1 * row["bytes"]


def test_the_start_of_a_run_is_the_sum_of_its_parts(tmp_path: Path) -> None:
    [found] = run_quick("startup.py", tmp_path)["runs"]["this"]
    for clock, parts in found.items():
        assert parts["import torch"] > 0
        assert parts["first step"] > 0, clock
        assert -0.05 <= parts["rest"] < parts["total"] / 2, "parts overlap, or one is missing"


def test_both_sides_play_the_demo(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="trl comes with the dev extra")
    report = run_quick("end_to_end.py", tmp_path, "--folder", str(tmp_path / "runs"), timeout=600)
    for run in report["runs"]:
        *_, last = run["points"]
        assert last["rollout"] == 2
        assert 0 < last["generate"] < last["wall_s"]
        assert last["reward"] > 0


@pytest.mark.parametrize("options", [["--kl", "0.1"], ["--lora", "4", "--checkpointing"]], ids=" ".join)
def test_a_step_of_ours_agrees_with_one_of_trl(tmp_path: Path, options: list[str]) -> None:
    pytest.importorskip("trl", reason="trl comes with the dev extra")
    sides = ["--sides", "ours", "stock", "compact", "--json", tmp_path / "report.json"]
    benchmark("train_step.py", "--quick", "--lengths", "ragged", *options, *sides)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["speedup_median"] > 0
    [run] = report["results"][0]["runs"]
    assert 0.01 < run["ours"]["clipped"] < 0.5
    assert (run["ours"]["reference_kl"] > 0.001) == ("--kl" in options)
    sides = report["results"][0]["sides"]
    assert sides["ours"]["computed_tokens"] < report["results"][0]["tokens"] <= sides["stock"]["computed_tokens"]


@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core comes with the megatron extra")
def test_steps_of_both_backends_agree(tmp_path: Path) -> None:
    [experts] = run_quick("backends.py", tmp_path, "--cases", "experts, 2 processes")["results"]
    assert list(experts["sides"]) == ["fsdp", "fsdp, experts", "megatron, experts"]
    for side in experts["sides"].values():
        assert side["wall_of_first"]["median"] > 0
        assert side["peak_mib"] > 100


def test_the_packing_benchmark_runs() -> None:
    *rows, end = [json.loads(line) for line in benchmark("packing.py", "--quick").stdout.splitlines()]
    assert len(rows) == 6
    assert all(row["ours"]["imbalance"] < 0.02 for row in rows)
    assert all(row["first-fit"]["times_ours"]["least"] > 0 for row in rows)
    assert end["laws"] == {"fill above 97 %": True, "imbalance below 2 %": True}  # what these sizes can show


def test_the_quick_run_of_low_precision_reports_state_and_frozen_weights(tmp_path: Path) -> None:
    flags = ["--cases", "adamw", "muon", "LoRA", "LoRA, nf4", "fp8 rowwise"]
    rows = {row["case"]: row for row in run_quick("low_precision.py", tmp_path, *flags)["rows"]}
    assert rows["muon"]["state_bytes"] < rows["adamw"]["state_bytes"]
    assert rows["LoRA, nf4"]["base_bytes_in_layers"] < 0.3 * rows["LoRA"]["base_bytes_in_layers"]
    assert rows["fp8 rowwise"]["grad_norm"] == pytest.approx(rows["adamw"]["grad_norm"], rel=0.1)
