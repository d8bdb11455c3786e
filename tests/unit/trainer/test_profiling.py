"""The profile of steps: written after the last one, not after an error, and with a memory snapshot on a GPU."""

import gzip
import json
import pickle
from pathlib import Path

import pytest
import torch
from torch.profiler import profile

from fsdptrain import platform
from fsdptrain.trainer.profiling import FOLDER, StepProfiler


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
    with gzip.open(tmp_path / FOLDER / "rank0_step2-3.json.gz") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert names.count("aten::mm") == 2


def test_an_error_after_the_last_profiled_step_does_not_end_the_trace_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, stop = [], profile.stop
    monkeypatch.setattr(profile, "stop", lambda self: ended.append(self) or stop(self))
    profiler = StepProfiler((1, 1), tmp_path)
    with platform.process_group(60):
        run(profiler, range(1, 3))
    with pytest.raises(ValueError):
        run(profiler, range(-1, 0))
    assert len(ended) == 1


def test_a_resumed_run_profiles_the_rest_of_its_steps(tmp_path: Path) -> None:
    with platform.process_group(60):
        run(StepProfiler((2, 4), tmp_path), range(3, 6))
        run(StepProfiler((2, 4), tmp_path / "late"), range(5, 8))
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == ["rank0_step3-4.json.gz"]
    assert not (tmp_path / "late").exists()


@pytest.mark.gpu
def test_a_gpu_adds_a_memory_snapshot(tmp_path: Path) -> None:
    with platform.process_group(60):
        run(StepProfiler((1, 1), tmp_path), range(1, 2), "cuda")
    snapshot = pickle.loads((tmp_path / FOLDER / "rank0_step1-1_memory.pickle").read_bytes())  # of this test
    assert snapshot["segments"]
