"""The profile of steps: written after the last one, not after an error, and with a memory snapshot on a GPU."""

import json
import pickle
from pathlib import Path

import pytest
import torch

from fsdptrain import platform
from fsdptrain.trainer.profiling import FOLDER, SUMMARY, StepProfiler


def run(profiler: StepProfiler, steps: range, device: str = "cpu") -> None:
    for step in steps:
        with profiler(step):
            torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)
            if step < 0:
                raise ValueError


def test_an_error_ends_the_trace_unwritten_and_later_steps_can_be_profiled(tmp_path: Path) -> None:
    profiler = StepProfiler((-1, 1), tmp_path)
    with pytest.raises(ValueError):
        run(profiler, range(-1, 2))
    assert not (tmp_path / FOLDER).exists()
    with platform.process_group(60):
        run(StepProfiler((2, 3), tmp_path), range(5))
    summary = json.loads((tmp_path / FOLDER / SUMMARY).read_text())
    calls = {row["name"]: row["calls"] for row in summary["operations"]}
    assert (summary["steps"], calls["aten::mm"]) == ([2, 3], 2)


def test_a_resumed_run_profiles_the_rest_of_its_steps_or_says_that_they_are_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with platform.process_group(60):
        run(StepProfiler((2, 4), tmp_path), range(3, 6))
        run(StepProfiler((2, 4), tmp_path / "late"), range(5, 8))
    assert json.loads((tmp_path / FOLDER / SUMMARY).read_text())["steps"] == [3, 4]
    assert not (tmp_path / "late").exists()
    assert caplog.text.count("trained before") == 1


@pytest.mark.gpu
def test_a_gpu_adds_a_memory_snapshot_and_its_own_clock(tmp_path: Path) -> None:
    with platform.process_group(60):
        run(StepProfiler((1, 1), tmp_path), range(1, 2), "cuda")
    assert json.loads((tmp_path / FOLDER / SUMMARY).read_text())["clock"] == "device"
    snapshot = pickle.loads((tmp_path / FOLDER / "rank0_step1-1_memory.pickle").read_bytes())  # of this test
    assert snapshot["segments"]
