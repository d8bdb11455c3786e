"""Files that are sent to the workers of one server over gloo: one that fails is told at once, by its own words."""

import asyncio
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fsdptrain.vllm.server.client import Deadline, ServerRefusedError, VLLMClient
from fsdptrain.vllm.server.push import Weights, send_files
from fsdptrain.vllm.worker.weight_group import WeightGroup, join_store
from tests.event_loop import run_in_loop


class TwoWorkers:
    """A client of a server with two workers, which are threads. Answers when both have ended, as vLLM does."""

    host, url = "127.0.0.1", "http://there"

    def __init__(self, failing: int | None) -> None:
        self.failing = failing  # rank of the worker that ends after it has joined
        self.received: list[int] = []
        self.bases: set[str | None] = set()
        self.last_received: list[str | None] = []  # by worker

    async def world_size(self, *, timeout: float) -> int:
        return 2

    async def call_workers(self, method: str, *args: Any, timeout: float) -> list[str | None]:
        if method == "fsdptrain_last_received":
            return self.last_received
        return list(await asyncio.gather(*(asyncio.to_thread(self.work, rank, *args) for rank in (1, 2))))

    def work(
        self, rank: int, plane: Any, host: str, port: int, world_size: int, timeout_s: float, *sizes: Any
    ) -> str | None:
        self.bases.add(sizes[3])
        store = join_store(host, port, world_size, timeout_s)
        group = WeightGroup(plane, store, rank=rank, world_size=world_size, timeout_s=timeout_s, address="127.0.0.1")
        if rank == self.failing:
            return "ValueError: it does not fit"
        try:
            self.received += [len(group.receive(size)) for size in sizes[1]]
        except RuntimeError as error:
            return f"RuntimeError: {str(error)[:40]}"
        return None


def weights(folder: Path, **given: Any) -> Weights:
    for name in ("a", "b"):
        save_file({name: torch.zeros(1 << 18)}, folder / name)
    return Weights([folder / "a", folder / "b"], "run/2", **given)


def test_every_worker_receives_every_file(tmp_path: Path) -> None:
    server, given = TwoWorkers(failing=None), weights(tmp_path)
    sent = run_in_loop(send_files(cast(VLLMClient, server), given, Deadline(60.0), "gloo"))
    sizes = [path.stat().st_size for path in given.files]
    assert sorted(server.received) == sorted(2 * sizes)
    assert sent == sum(sizes)


@pytest.mark.parametrize(
    ("held", "base", "takes_delta"),
    [
        (["run/1"] * 2, "run/1", True),
        (["run/1", None], "run/1", False),
        (["run/0"] * 2, "run/1", False),
        ([None] * 2, None, False),
    ],
)
def test_only_a_server_whose_workers_hold_the_previous_version_gets_deltas(
    tmp_path: Path, held: list[str | None], base: str | None, takes_delta: bool
) -> None:
    delta = np.zeros(10, np.uint8)
    server, given = TwoWorkers(failing=None), weights(tmp_path, deltas=[None, delta], previous_tag=base)
    server.last_received = held
    sent = run_in_loop(send_files(cast(VLLMClient, server), given, Deadline(60.0), "gloo"))
    full = given.files[0].stat().st_size
    assert sorted(server.received) == sorted(2 * [full, 10 if takes_delta else full])
    assert sent == full + (10 if takes_delta else full)
    assert server.bases == {base if takes_delta else None}


@pytest.mark.parametrize("failing", [1, 2])
def test_a_worker_that_fails_leaves_nobody_waiting(tmp_path: Path, failing: int) -> None:
    begin = time.monotonic()
    with pytest.raises(ServerRefusedError, match="ValueError: it does not fit"):
        run_in_loop(send_files(cast(VLLMClient, TwoWorkers(failing)), weights(tmp_path), Deadline(60.0), "gloo"))
    assert time.monotonic() - begin < 30
