"""Weights reach files and workers bit by bit, and a group of workers without waiting for dead ones."""

import errno
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from fsdptrain import platform
from fsdptrain.vllm.server import weight_files
from fsdptrain.vllm.server.client import Deadline, ServerGoneError, ServerRefusedError
from fsdptrain.vllm.server.push import Weights, send_files
from fsdptrain.vllm.server.weight_files import WeightFolder, folder_name
from fsdptrain.vllm.worker.sparse_delta import apply_sparse_delta
from fsdptrain.vllm.worker.weight_group import tensors_of
from tests.event_loop import run_in_loop
from tests.unit.vllm.scripted_server import ScriptedServer

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8)
SHAPES = [(9_000, torch.float32), (40_000, torch.bfloat16), (1, torch.bfloat16), (0, torch.int8), (5, torch.float16),
          (66_001, torch.int8)]  # fmt: skip
shapes = st.lists(st.integers(0, 5), max_size=3)
tensors = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=8)


def make(kinds: list) -> dict[str, torch.Tensor]:
    return {f"t{i}": (torch.rand(shape) * 100 - 50).to(dtype) for i, (shape, dtype) in enumerate(kinds)}


@given(tensors)
def test_the_bytes_of_a_file_hold_every_tensor(tmp_path_factory, kinds):
    weights, path = make(kinds), tmp_path_factory.mktemp("weights") / "file"
    save_file(weights, path, metadata={"format": "pt"})
    found = dict(tensors_of(torch.from_numpy(np.fromfile(path, np.uint8))))
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], t) and found[name].dtype == t.dtype for name, t in weights.items())


@given(tensors, st.integers(1, 400))
def test_files_have_every_tensor_of_the_newest_version_once(tmp_path_factory, kinds, limit):
    path = tmp_path_factory.mktemp("weights") / "here"
    folder = WeightFolder(path, max_file_bytes=limit)
    folder.write({"old": torch.ones(50)}.items(), "run/1")
    weights = make(kinds)
    files = folder.write(weights.items(), "run/2")
    assert sorted(path.iterdir()) == files
    parts = [load_file(file) for file in files]
    assert sorted(name for part in parts for name in part) == sorted(weights)
    for part in parts:
        assert all(torch.equal(tensor, weights[name]) for name, tensor in part.items())
        assert len(part) == 1 or sum(tensor.nbytes for tensor in part.values()) <= limit
    folder.delete()
    assert not path.exists()


@given(st.lists(st.lists(st.sampled_from([0, 1, 2, 3, -1]), min_size=6, max_size=6), min_size=2, max_size=4))
def test_the_deltas_of_a_version_give_its_files(tmp_path_factory, changes):
    """From the files of the version before, whatever has changed between two versions: nothing, elements or all."""
    folder = WeightFolder(tmp_path_factory.mktemp("weights") / "here", max_file_bytes=70_000, with_deltas=True)
    weights = {f"t{i}": torch.rand(size).to(dtype) for i, (size, dtype) in enumerate(SHAPES)}
    held: list[np.ndarray] = []
    for version, numbers in enumerate(changes):
        for tensor, number in zip(weights.values(), numbers, strict=True):
            tensor[: len(tensor) if number < 0 else number] *= 3
        files = [np.fromfile(path, np.uint8) for path in folder.write(weights.items(), f"run/{version}")]
        if not version:
            assert folder.deltas == [None] * len(files)
            held = files
        for i, delta in enumerate(folder.deltas):
            if delta is None:
                held[i] = files[i]
            else:
                assert len(delta) <= 0.75 * len(files[i]) + 1
                apply_sparse_delta(held[i], delta)
        assert all(map(np.array_equal, held, files))
    if not any(map(any, changes[1:])):
        assert all(delta is not None for delta in folder.deltas)


def test_servers_get_all_weights_at_regular_intervals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_files, "FULL_EVERY", 3)
    folder = WeightFolder(tmp_path / "here", max_file_bytes=10_000, with_deltas=True)
    weights = {"weight": torch.ones(1000)}
    full = []
    for version in range(8):
        folder.write(weights.items(), f"run/{version}")
        full.append(folder.deltas[0] is None)
    assert full == [True, False, False, True, False, False, True, False]


def test_other_tensors_than_before_are_sent_in_full(tmp_path: Path) -> None:
    folder = WeightFolder(tmp_path / "here", max_file_bytes=4000, with_deltas=True)
    weights = {"a": torch.ones(1000), "b": torch.ones(1000)}
    for more in ({}, {}, {"c": torch.ones(1)}, {"c": torch.ones(2)}, {"c": torch.zeros(2)}):
        folder.write((weights | more).items(), "run/1")
        assert len({delta is None for delta in folder.deltas}) == 1
    assert folder.deltas[0] is not None


@pytest.mark.parametrize("failing", [1, 2])  # a file of three
def test_after_a_write_that_failed_no_delta_is_against_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    folder, save = WeightFolder(tmp_path / "here", max_file_bytes=4000, with_deltas=True), WeightFolder._save
    weights = {name: torch.ones(1000) for name in "abc"}

    def fail(self: WeightFolder, parts: Any) -> None:
        save(self, parts)
        if len(self._files) > failing:
            raise OSError(errno.ENOSPC, "full")

    folder.write(weights.items(), "run/1")
    with monkeypatch.context() as patch, pytest.raises(OSError, match="full"):
        patch.setattr(WeightFolder, "_save", fail)
        folder.write(weights.items(), "run/2")
    assert folder.write(weights.items(), "run/3") == sorted((tmp_path / "here").iterdir())
    assert (folder.base, folder.deltas) == (None, [None] * 3)
    folder.write(weights.items(), "run/4")
    assert folder.base == "run/3"
    assert all(delta is not None for delta in folder.deltas)


@pytest.mark.parametrize(("with_deltas", "room"), [(False, 3), (True, 4)])
def test_a_version_needs_no_room_beside_the_one_before_but_for_one_file_with_deltas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_deltas: bool, room: int
) -> None:
    folder, save, peak = (
        WeightFolder(tmp_path / "here", max_file_bytes=4000, with_deltas=with_deltas),
        WeightFolder._save,
        0,
    )

    def watched(self: WeightFolder, parts: Any) -> None:
        nonlocal peak
        save(self, parts)
        peak = max(peak, len(list(self.path.iterdir())))

    monkeypatch.setattr(WeightFolder, "_save", watched)
    for version in range(3):
        folder.write({name: torch.ones(1000) for name in "abc"}.items(), f"run/{version}")
    assert peak == room


@pytest.mark.gpu
@pytest.mark.skipif(not platform.has_accelerator(), reason="needs a GPU")
def test_weights_on_a_device_are_written_with_one_wait_per_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {f"t{i}": torch.rand(1000, device=platform.local_device()) for i in range(10)}
    wait, waits = torch.accelerator.synchronize, []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: waits.append(1) or wait())
    files = WeightFolder(tmp_path / "here", max_file_bytes=8000).write(weights.items(), "run/1")
    assert len(waits) == len(files) == 5
    found = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert all(torch.equal(found[name], tensor.cpu()) for name, tensor in weights.items())


def test_a_full_disk_is_reported_after_all_weights_were_gathered(tmp_path):
    """Iterating is collective: the other ranks must not wait for this one."""
    read = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(5):
            read.append(i)
            yield f"t{i}", torch.ones(100)

    folder = WeightFolder(tmp_path / "here", max_file_bytes=400)
    shutil.rmtree(tmp_path / "here")
    with pytest.raises(OSError, match="here"):
        folder.write(weights(), "run/1")
    assert read == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("error", [MemoryError(), ValueError("wrong")])
def test_an_error_of_a_delta_is_not_raised_before_all_weights_were_gathered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: Any) -> None:
        raise error

    folder = WeightFolder(tmp_path / "here", max_file_bytes=400, with_deltas=True)
    folder.write({f"t{i}": torch.ones(100) for i in range(3)}.items(), "run/1")
    monkeypatch.setattr(weight_files, "sparse_delta", fail)
    weights = iter({f"t{i}": torch.ones(100) for i in range(3)}.items())
    if isinstance(error, MemoryError):
        folder.write(weights, "run/2")
        assert folder.deltas == [None] * 3
    else:
        with pytest.raises(OSError, match="ValueError: wrong"):
            folder.write(weights, "run/2")
    assert list(weights) == []


@pytest.mark.parametrize("fault", ["dies", "refuses"])
def test_a_server_that_does_not_join_the_group_is_not_waited_for(fault):
    server, path = ScriptedServer(), "/collective_rpc"
    if fault == "dies":
        server.breaks_off.add(path)
    else:
        server.refuses[path] = "no such engine"
    start = time.monotonic()
    error, text = (ServerGoneError, "") if fault == "dies" else (ServerRefusedError, ".*fsdptrain is not the trainer's")
    with pytest.raises(error, match=f"POST {path}{text}"):
        run_in_loop(send_files(server.client, Weights([], "run/1"), Deadline(60.0), "gloo"))
    assert time.monotonic() - start < 20


def test_runs_have_folders_of_their_own():
    assert folder_name(Path("runs/a")) == folder_name(Path("runs/../runs/a"))
    assert folder_name(Path("runs/a")) != folder_name(Path("runs/b"))
