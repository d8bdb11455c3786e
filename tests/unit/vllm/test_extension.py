"""A worker takes a delta only against the files that it holds, and returns every error."""

import os
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdptrain.vllm.worker import received_files

CALL = ("gloo", "127.0.0.1", 1, 2, 5.0, [100], [10], "run/2")


@pytest.fixture
def extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, without vLLM."""
    monkeypatch.setattr(received_files, "_SHARED_MEMORY", tmp_path)
    monkeypatch.setitem(sys.modules, "fsdptrain.vllm.worker.reload", SimpleNamespace(reload_weights=None))  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, "fsdptrain.vllm.worker.extension", raising=False)
    yield import_module("fsdptrain.vllm.worker.extension")
    sys.modules.pop("fsdptrain.vllm.worker.extension", None)


@pytest.mark.parametrize("held", [None, "run/0"])
def test_a_delta_against_a_version_that_is_not_held_is_refused(extension: Any, held: str | None) -> None:
    worker = extension.WorkerExtension()
    worker._fsdptrain_last = held and SimpleNamespace(tag=held)
    assert "does not hold version run/1" in worker.fsdptrain_receive_weights(*CALL, "run/1")
    assert worker.fsdptrain_last_received() is None


@pytest.mark.parametrize("failing", ["join_store", "WeightGroup", "ReceivedFiles"])
def test_an_error_of_any_part_is_returned_and_leaves_nothing_open(
    extension: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no peer")

    monkeypatch.setattr(extension, "join_store", lambda *_: None)
    monkeypatch.setattr(extension, failing, fail)
    worker = extension.WorkerExtension()
    worker.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_index=0, world_size=1, rank=0))
    before = os.listdir("/proc/self/fd")
    assert worker.fsdptrain_receive_weights(*CALL, None) == "RuntimeError: no peer"
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert not list(tmp_path.iterdir())
