"""Servers of our own: started, watched, started again with their weights, and given up when that does not help."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fsdptrain.errors import RolloutError
from fsdptrain.vllm.server.client import ServerGoneError, VLLMClient
from fsdptrain.vllm.server.dispatcher import Dispatcher
from fsdptrain.vllm.server.fleet import Fleet, Server, State
from fsdptrain.vllm.server.process import Launch, ServerProcess
from fsdptrain.vllm.server.push import Deadline, FilePush, Weights

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("scripted_vllm.py")
Start = Callable[..., tuple[Fleet, list[ServerProcess]]]


@pytest.fixture
def start(tmp_path) -> Iterator[Start]:
    fleets = []
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {SCRIPT} "$@"\n')
    python.chmod(0o755)

    def make(*flags: str, count: int = 1, sync_timeout: float = 60.0, **more: Any) -> tuple[Fleet, list[ServerProcess]]:
        launch = Launch(str(python), flags, tmp_path, tmp_path / "weights", "key")
        processes = [ServerProcess(launch, i, None) for i in range(count)]
        servers = [Server(VLLMClient(process.url, "key"), process) for process in processes]
        fleet = Fleet(servers, push=FilePush(), sync_timeout=sync_timeout, start_timeout=60.0, min_servers=1, **more)
        fleets.append(fleet)
        fleet.start()
        return fleet, processes

    yield make
    for fleet in fleets:
        fleet.close()
    assert not [p for p in psutil.Process().children(recursive=True) if "scripted_vllm" in " ".join(p.cmdline())]


def listening(process: ServerProcess) -> int:
    """The process id of the server behind its keeper."""
    [found] = {c.pid for c in psutil.net_connections("tcp") if c.laddr.port == process.port and c.status == "LISTEN"}
    return found


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_one_that_dies_or_hangs_is_started_again_and_has_the_weights(start, number):
    fleet, [first, second] = start(count=2, sync_timeout=10.0)  # so long one that hangs is waited for
    assert fleet.switch(Weights([], "run/1")) == [first.url, second.url]
    before = listening(first)
    os.kill(before, number)
    until(lambda: not psutil.pid_exists(before))
    assert fleet.switch(Weights([], "run/2")) in ([second.url], [first.url, second.url])
    assert fleet.wait_for(2, 60.0) == [first.url, second.url]
    assert VLLMClient(first.url, "key").version(timeout=60.0) == "run/2"


def test_one_that_comes_back_with_other_weights_is_started_again_and_not_used(start):
    looked: list[tuple[str, bool]] = []

    def prove(client: VLLMClient, weights: Weights, deadline: Deadline) -> None:
        looked.append((weights.tag, client.get("/is_paused", timeout=deadline.left)["is_paused"]))
        if len(looked) == 1:
            raise ServerGoneError("it does not hold what it was given")

    fleet, [first, second] = start(count=2, prove=prove)
    fleet.switch(Weights([], "run/1"))
    assert not looked  # --sync-check does that
    before = listening(first)
    os.kill(before, signal.SIGKILL)
    until(lambda: len(looked) == 2)
    assert fleet.wait_for(2, 60.0) == [first.url, second.url]
    assert looked == [("run/1", True)] * 2  # none asks it before it is proven


def test_new_weights_do_not_wait_for_one_that_hangs_while_it_is_given_old_ones(start, tmp_path):
    sign = tmp_path / "hang"
    fleet, [first, second] = start("--hangs-if", str(sign), count=2)
    fleet.switch(Weights([], "run/1"))
    sign.touch()
    os.kill(listening(first), signal.SIGKILL)
    hanging = fleet._servers[0]
    until(lambda: hanging.starts == 1 and hanging.state is State.UP)  # again, and it is given its weights
    sign.unlink()
    begin = time.monotonic()
    fleet.forget_weights()
    assert fleet.switch(Weights([], "run/2")) == [second.url]
    assert time.monotonic() - begin < 30
    assert fleet.wait_for(2, 60.0) == [first.url, second.url]
    assert VLLMClient(first.url, "key").version(timeout=60.0) == "run/2"


def test_one_that_dies_of_every_request_is_given_up_and_the_rollout_ends(start):
    fleet, [process] = start("--dies-when-asked")
    fleet.switch(Weights([], "run/1"))
    dispatcher = Dispatcher(
        [VLLMClient(process.url, "key")], ready=[process.url], tag="run/1", silence=5.0, patience=600.0, min_servers=1,
        check=fleet.raise_if_unrecoverable,
    )  # fmt: skip
    with pytest.raises(RolloutError, match=r"0 of 1 servers are there, and 1 are needed|a request failed 5 times"):
        dispatcher.run([{"token_ids": [1]}] * 3, per_group=1)


def test_one_that_cannot_start_ends_the_run_with_its_last_words(start):
    with pytest.raises(
        RolloutError, match=r"it ended while it started .*server0\.log: ValueError: there is no such model"
    ):
        start("--cannot-start")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of the thread that looks
def test_a_limit_of_this_process_is_not_blamed_on_a_server(start, monkeypatch):
    fleet, [process] = start()

    def no_more_files(self: VLLMClient, *, timeout: float) -> str:
        raise RolloutError("no more files can be opened here")

    before = listening(process)
    monkeypatch.setattr(VLLMClient, "version", no_more_files)
    until(lambda: fleet._failure is not None)
    with pytest.raises(RolloutError, match=r"could not be looked after: .*no more files can be opened here"):
        fleet.wait_for(1, 60.0)
    assert listening(process) == before
