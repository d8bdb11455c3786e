"""Workers share one copy of the files, which ends with them, and do without it if there is no room."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdptrain.vllm.worker import received_files
from fsdptrain.vllm.worker.received_files import ReceivedFiles
from fsdptrain.vllm.worker.sparse_delta import sparse_delta

SIZES = [200_001, 3, 70_000]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(received_files, "_SHARED_MEMORY", tmp_path)
    return tmp_path


def some_files(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(256, (size,), dtype=torch.uint8, generator=generator) for size in SIZES]


def opened() -> ReceivedFiles:
    return ReceivedFiles("files", SIZES)


def test_workers_share_one_copy_and_each_reads_the_new_files(folder: Path) -> None:
    workers = [opened(), opened()]
    assert sum(os.stat(path).st_blocks for path in folder.iterdir()) == 0  # a worker may be killed now
    files = some_files(0)
    for worker in workers:
        worker.allocate()
        worker.close()
        for i, file in enumerate(files):
            assert torch.equal(worker.update(i, file), file)
        worker.finish("run/1")
        assert worker.tag == "run/1"
    assert not list(folder.iterdir())
    new = [file.clone() for file in files]
    for file in new:
        file[:10] += 1
    deltas: list[Any] = [sparse_delta(a.numpy(), b.numpy()) for a, b in zip(files, new, strict=True)]
    sent = [b if delta is None else torch.from_numpy(delta) for b, delta in zip(new, deltas, strict=True)]
    assert len(sent[0]) < 100
    for i in range(len(SIZES)):
        assert torch.equal(workers[0].update(i, sent[i]), new[i])
    assert workers[0]._memory is not None
    assert workers[1]._memory is not None
    assert torch.equal(workers[0]._memory, workers[1]._memory)
    for i in range(len(SIZES)):
        assert torch.equal(workers[1].update(i, sent[i]), new[i])


@pytest.mark.parametrize("full", ["memory", "file system", "nothing is writable", "another user's"])
def test_without_room_nothing_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch, full: str) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    if full == "memory":
        monkeypatch.setattr(received_files, "host_memory", lambda: (sum(SIZES), 1 << 40))
    elif full == "file system":
        monkeypatch.setattr(os, "posix_fallocate", refuse)
    elif full == "another user's":
        (folder / "files").touch(mode=0o666)
        (folder / "files").chmod(0o666)
    else:
        (folder / "files").symlink_to(folder / "elsewhere")
    worker, files = opened(), some_files(0)
    worker.allocate()
    worker.close()
    assert [worker.update(i, file) is file for i, file in enumerate(files)] == [True] * 3
    worker.finish("run/1")
    assert worker.tag is None
    assert bool(list(folder.iterdir())) == (full in ("nothing is writable", "another user's"))


def test_two_servers_of_a_machine_do_not_take_the_same_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def host_memory() -> tuple[int, int]:
        return 3 * sum(SIZES) - sum(worker._memory is not None for worker in workers) * sum(SIZES), 1 << 40

    monkeypatch.setattr(received_files, "host_memory", host_memory)
    names = ["a", "a", "b"]  # two workers of server a
    workers: list[ReceivedFiles] = []
    workers += [ReceivedFiles(name, SIZES) for name in names]
    for worker in workers:
        worker.allocate()
        worker.close()
    assert [worker._memory is not None for worker in workers] == [True, True, False]
