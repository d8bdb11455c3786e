"""The benchmarks run from their first to their last line."""

import importlib
import json
import multiprocessing
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.matrix


def run_quick(name: str, folder: Path, *flags: str, timeout: float = 300) -> dict[str, Any]:
    """The report of a benchmark with --quick."""
    target = folder / "report.json"
    (folder / "scratch").mkdir(exist_ok=True)
    argv = [sys.executable, FOLDER / name, "--quick", "--json", target, *flags]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(target.read_text())
    assert {"command", "commit", "machine", "versions"} <= report.keys()
    return report


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


def test_the_quick_run_of_older_weights_trains_on_them(tmp_path: Path) -> None:
    argv = [sys.executable, FOLDER / "staleness.py", "--quick", "--engines", "hf", "--staleness", "1", "--seeds", "0"]
    done = subprocess.run([*argv, "--folder", tmp_path], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout.splitlines()[-1])
    assert (row["engine"], row["max_staleness"], row["staleness_max"]) == ("hf", 1, 1.0)
    assert 0 < row["seconds"]["train"] < row["seconds"]["step"]


@pytest.mark.parametrize("name", ["throughput", "sync_check"])
def test_the_quick_runs_of_engines_report_the_embedded_one(name: str) -> None:
    argv = [sys.executable, FOLDER / f"{name}.py", "--quick", "--engines", "hf"]
    argv += ["--staleness", "1"] if name == "sync_check" else []
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout.splitlines()[-1])
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
    chosen = ["--kinds", "grpo", "--adapters", "full", "--variants", "base", "flash-attn 2"]
    base, flash = run_quick("mfu.py", tmp_path, *chosen)["results"]
    assert 0 < base["mfu_causal"]["median"] < base["mfu"]["median"]
    assert "ConfigError: --attn-implementation flash_attention_2" in flash["failed"]


def test_mfu_says_where_there_is_no_gpu() -> None:
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, FOLDER / "mfu.py"], capture_output=True, text=True, env=variables, timeout=300, check=False
    )
    assert done.returncode == 1
    assert "this machine has no GPU" in done.stderr


def test_ranks_send_what_is_planned_and_more_gpus_are_modelled(tmp_path: Path) -> None:
    report = run_quick("scaling.py", tmp_path)
    one, two = report["measured"]
    assert (one["ranks"], two["ranks"]) == (1, 2)
    assert two["gathered_mb"] > 0
    weak = {row["gpus"]: row for row in report["model"] if (row["mesh"], row["scaling"]) == ("FSDP", "weak")}
    assert weak[8]["no overlap"] > weak[4096]["no overlap"]
    assert (tmp_path / "report.png").stat().st_size > 1000


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
    argv = [sys.executable, FOLDER / "train_step.py", "--quick", "--lengths", "ragged", *options]
    argv += ["--sides", "ours", "stock", "compact", "--json", tmp_path / "report.json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["speedup_median"] > 0
    [run] = report["results"][0]["runs"]
    assert 0.01 < run["ours"]["clipped"] < 0.5
    assert (run["ours"]["reference_kl"] > 0.001) == ("--kl" in options)
    sides = report["results"][0]["sides"]
    assert sides["ours"]["computed_tokens"] < report["results"][0]["tokens"] <= sides["stock"]["computed_tokens"]


def test_a_step_with_another_kl_coefficient_does_not_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In groups of one, where the advantage is what the mean over all samples leaves."""
    pytest.importorskip("trl", reason="trl comes with the dev extra")
    monkeypatch.syspath_prepend(str(FOLDER))
    train_step = importlib.import_module("train_step")
    monkeypatch.setattr(sys, "argv", ["train_step.py", "--quick", "--kl", "0.1"])
    options = train_step.parsed()
    options.groups, options.group_size = 8, 1
    case = train_step.Case(str(tmp_path), options.vocab[0], "ragged", options)
    other = replace(case, options=Namespace(**{**vars(options), "kl": 0.11}))
    assert any(sample.advantage > 0 for sample in train_step.make_samples(case))
    train_step.save_models(tmp_path, options, case.vocab)
    begun = [begin(train_step.work, *at) for at in (("ours", case), ("compact", case), ("compact", other))]
    ours, same, wrong = map(first_step, begun)
    require_agreement = partial(train_step.require_agreement, tolerance=train_step.TOLERANCES[False], case=case.name)
    require_agreement({"ours": ours, "compact": same})
    with pytest.raises(SystemExit, match="loss is"):
        require_agreement({"ours": ours, "compact": wrong})
    with pytest.raises(SystemExit, match="grad_norm is"):
        require_agreement({"ours": ours, "compact": wrong | {"loss": ours["loss"]}})


def begin(work: Callable[..., None], side: str, case: Any) -> Connection:
    """A side in a process of its own, as the benchmark has it."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    context.Process(target=work, args=(side, case, theirs), daemon=True).start()
    theirs.close()
    return pipe


def first_step(pipe: Connection) -> dict[str, float]:
    assert pipe.poll(240)
    assert pipe.recv() == "ready"
    pipe.send("step")
    assert pipe.poll(240)
    found = pipe.recv()
    pipe.send("end")
    return found


@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core comes with the megatron extra")
def test_steps_of_both_backends_agree(tmp_path: Path) -> None:
    [experts] = run_quick("backends.py", tmp_path, "--cases", "experts, 2 processes")["results"]
    assert list(experts["sides"]) == ["fsdp", "fsdp, experts", "megatron, experts"]
    for side in experts["sides"].values():
        assert side["wall_of_first"]["median"] > 0
        assert side["peak_mib"] > 100


def test_the_packing_benchmark_runs() -> None:
    argv = [sys.executable, FOLDER / "packing.py", "--quick"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    *rows, end = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 6
    assert all(row["ours"]["imbalance"] < 0.02 for row in rows)
    assert all(row["first-fit"]["times_ours"]["least"] > 0 for row in rows)
    assert end["laws"] == {"fill above 97 %": True, "imbalance below 2 %": True}  # what these sizes can show
