"""Weights reach files and workers bit by bit, and a group of workers without waiting for dead ones."""

import asyncio
import shutil
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from fsdptrain import platform
from fsdptrain.errors import RolloutError
from fsdptrain.vllm.server.client import Deadline, VLLMClient
from fsdptrain.vllm.server.push import send_files
from fsdptrain.vllm.server.weight_files import WeightFolder, folder_name
from fsdptrain.vllm.worker.weight_group import WeightGroup, join_store, tensors_of
from tests.event_loop import run_in_loop

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8)
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
    folder.write({"old": torch.ones(50)}.items())
    weights = make(kinds)
    files = folder.write(weights.items())
    assert sorted(path.iterdir()) == files
    parts = [load_file(file) for file in files]
    assert sorted(name for part in parts for name in part) == sorted(weights)
    for part in parts:
        assert all(torch.equal(tensor, weights[name]) for name, tensor in part.items())
        assert len(part) == 1 or sum(tensor.nbytes for tensor in part.values()) <= limit
    folder.delete()
    assert not path.exists()


@pytest.mark.gpu
@pytest.mark.skipif(not platform.has_accelerator(), reason="needs a GPU")
def test_weights_on_a_device_are_written_with_one_wait_per_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {f"t{i}": torch.rand(1000, device=platform.local_device()) for i in range(10)}
    wait, waits = torch.accelerator.synchronize, []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: waits.append(1) or wait())
    files = WeightFolder(tmp_path / "here", max_file_bytes=8000).write(weights.items())
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
        folder.write(weights())
    assert read == [0, 1, 2, 3, 4]


def test_runs_have_folders_of_their_own():
    assert folder_name(Path("runs/a")) == folder_name(Path("runs/../runs/a"))
    assert folder_name(Path("runs/a")) != folder_name(Path("runs/b"))


class TwoWorkers:
    """A client of a server with two workers, which are threads. Answers when both have ended, as vLLM does."""

    host, url = "127.0.0.1", "http://there"

    def __init__(self, failing: int | None) -> None:
        self.failing = failing  # rank of the worker that ends after it has joined
        self.received: list[int] = []

    async def world_size(self, *, timeout: float) -> int:
        return 2

    async def call_workers(self, method: str, *args: Any, timeout: float) -> list[str | None]:
        return list(await asyncio.gather(*(asyncio.to_thread(self.work, rank, *args) for rank in (1, 2))))

    def work(self, rank: int, host: str, port: int, world_size: int, timeout_s: float, sizes: list[int]) -> str | None:
        store = join_store(host, port, world_size, timeout_s)
        group = WeightGroup(store, rank=rank, world_size=world_size, timeout_s=timeout_s, address="127.0.0.1")
        if rank == self.failing:
            return "ValueError: it does not fit"
        try:
            self.received += [len(group.receive(size)) for size in sizes]
        except RuntimeError as error:
            return f"RuntimeError: {str(error)[:40]}"
        return None


def files(folder: Path) -> list[Path]:
    for name in ("a", "b"):
        save_file({name: torch.zeros(1 << 18)}, folder / name)
    return [folder / "a", folder / "b"]


@pytest.mark.parametrize("failing", [None, 1, 2])
def test_every_worker_receives_every_file_and_one_that_fails_leaves_nobody_waiting(
    tmp_path: Path, failing: int | None
) -> None:
    server, given, begin = TwoWorkers(failing), files(tmp_path), time.monotonic()
    with pytest.raises(RolloutError, match="ValueError: it does not fit") if failing else nullcontext():
        run_in_loop(send_files(cast(VLLMClient, server), given, Deadline(60.0)))
    assert time.monotonic() - begin < 30
    assert failing or sorted(server.received) == sorted(2 * [path.stat().st_size for path in given])
