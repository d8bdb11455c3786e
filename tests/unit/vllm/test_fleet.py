"""All servers switch version together, or the run ends and says which did not; the run's own servers are restarted."""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fsdptrain.config import Config
from fsdptrain.errors import RolloutError
from fsdptrain.vllm.server import fleet as module
from fsdptrain.vllm.server.client import Deadline, ServerGoneError, VLLMClient
from fsdptrain.vllm.server.dispatcher import Dispatcher
from fsdptrain.vllm.server.event_loop import EventLoop
from fsdptrain.vllm.server.fleet import Fleet, Server, State
from fsdptrain.vllm.server.process import HOST, ServerProcess
from fsdptrain.vllm.server.push import Weights
from tests.event_loop import run_in_loop
from tests.matrix import only
from tests.unit.vllm.scripted_server import ScriptedServer

WEIGHTS = Weights([], "run/2")
SCRIPT = Path(__file__).with_name("scripted_vllm.py")


def fleet_of(servers: list[Server], **options: Any) -> Fleet:
    values = {"weight_sync_timeout": 60.0, "server_start_timeout": 60.0, "rollout_num_servers": len(servers)}
    return Fleet(servers, Config(hf_checkpoint="x", rollout_engine="vllm-server", bf16=False, **values | options))


def switch(*servers: ScriptedServer, **options: Any) -> list[str]:
    return run_in_loop(fleet_of([Server(server.client) for server in servers], **options).switch(WEIGHTS))


def test_each_server_is_paused_updated_and_checked_before_any_resumes():
    servers = [ScriptedServer(), ScriptedServer()]
    assert switch(*servers) == [server.client.url for server in servers]
    order = "/pause /collective_rpc /update_weight_version /reset_prefix_cache /weight_info /resume"
    assert [server.calls for server in servers] == [order.split()] * 2


@pytest.mark.parametrize("fault", ["refused", "broken JSON"])
@pytest.mark.parametrize("path", ["/collective_rpc", "/weight_info", "/reset_prefix_cache"])
def test_a_server_that_answers_but_does_not_switch_ends_the_run_and_none_resumes(path, fault):
    good, bad = ScriptedServer(), ScriptedServer()
    if fault == "refused":
        bad.refuses[path] = "no such weight"
    else:
        bad.texts[path] = '{"broken": '
    with pytest.raises(RolloutError) as caught:
        switch(good, bad)
    message = str(caught.value)
    assert f"{bad.client.url} answered" in message
    assert f"switched, but not used: {good.client.url}" in message
    assert "\n" not in message
    assert "/resume" not in [*good.calls, *bad.calls]
    assert all(bad.calls.count(call) == 1 for call in bad.calls if call not in ("/health", "/weight_info"))


def test_a_prefix_cache_that_is_not_reset_ends_the_run():
    server = ScriptedServer()
    server.texts["/reset_prefix_cache"] = '{"success": false}'
    with pytest.raises(RolloutError, match="did not reset its prefix cache"):
        switch(server)


def test_dead_servers_are_left_out_while_enough_are_up():
    dead, alive = ScriptedServer(dies_after=0), ScriptedServer()
    assert switch(dead, alive) == [alive.client.url]
    with pytest.raises(RolloutError, match=rf"1 of 2 servers are up, and 2 are needed .*{dead.client.url}"):
        switch(dead, alive, min_servers=2)


def test_a_restarted_server_of_the_user_rejoins_and_one_that_only_woke_up_does_not(monkeypatch):
    """The latter may hold half of an update."""
    monkeypatch.setattr(module, "_REJOIN_S", 60.0)
    gone, alive = ScriptedServer(dies_after=0), ScriptedServer()
    fleet = fleet_of([Server(gone.client), Server(alive.client)])
    assert run_in_loop(fleet.switch(WEIGHTS)) == [alive.client.url]
    gone.dies_after = None
    assert run_in_loop(fleet.switch(WEIGHTS)) == [alive.client.url]
    gone.version = "default"
    assert run_in_loop(fleet.switch(WEIGHTS)) == [gone.client.url, alive.client.url]


@pytest.mark.slow
def test_hung_servers_cost_the_others_no_time():
    """A server that has switched must still be resumed, and may be slow at that."""
    paths, alive = ("/pause", "/collective_rpc", "/weight_info"), ScriptedServer()
    hung = [ScriptedServer() for _ in paths]
    for server, path in zip(hung, paths, strict=True):
        server.delays[path] = 60.0
    alive.delays["/resume"] = 0.2
    start = time.monotonic()
    assert switch(*hung, alive, weight_sync_timeout=12.0) == [alive.client.url]
    assert time.monotonic() - start < 2 * 12.0  # each hangs for 0.75 x 12 s: not one after another
    assert alive.calls[-1] == "/resume"


Start = Callable[..., tuple[Fleet, list[ServerProcess]]]


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    loop = EventLoop()
    yield loop
    loop.close()


@pytest.fixture
def start(tmp_path, loop) -> Iterator[Start]:
    """Starts scripted servers in processes of their own."""
    fleets = []
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {SCRIPT} "$@"\n')
    python.chmod(0o755)

    def make(*flags: str, count: int = 1, **options: Any) -> tuple[Fleet, list[ServerProcess]]:
        processes = [
            ServerProcess(str(python), flags, tmp_path / f"server{i}.log", api_key="key", weights=tmp_path / "weights")
            for i in range(count)
        ]
        fleet = fleet_of([Server(VLLMClient(process.url, "key"), process) for process in processes], **options)
        fleets.append((fleet, processes))
        loop.run(fleet.start())
        return fleet, processes

    yield make
    for fleet, processes in fleets:
        loop.run(fleet.close())
        assert not any(process._imports.exists() for process in processes)
    assert not [p for p in psutil.Process().children(recursive=True) if "scripted_vllm" in " ".join(p.cmdline())]


def pid_of(process: ServerProcess) -> int:
    """The process id of the server behind its supervisor."""
    [found] = {c.pid for c in psutil.net_connections("tcp") if c.laddr.port == process.port and c.status == "LISTEN"}
    return found


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize("number", only([signal.SIGKILL], [signal.SIGKILL, signal.SIGSTOP]))
@pytest.mark.slow
def test_a_server_that_dies_or_hangs_is_restarted_with_the_weights(start, loop, number):
    fleet, [first, second] = start(count=2, weight_sync_timeout=10.0)
    assert loop.run(fleet.switch(Weights([], "run/1"))) == [first.url, second.url]
    before = pid_of(first)
    os.kill(before, number)
    until(lambda: not psutil.pid_exists(before))
    assert loop.run(fleet.switch(Weights([], "run/2"))) in ([second.url], [first.url, second.url])
    assert loop.run(fleet.wait_for(2, 60.0)) == [first.url, second.url]
    assert loop.run(VLLMClient(first.url, "key").version(timeout=60.0)) == "run/2"


def test_a_restarted_server_with_wrong_weights_is_not_used(start, loop, monkeypatch):
    checked: list[tuple[str, bool]] = []

    async def require_weights(client: VLLMClient, weights: Weights, deadline: Deadline) -> None:
        checked.append((weights.tag, await client.is_paused(timeout=deadline.left)))
        if len(checked) == 1:
            raise ServerGoneError("it holds other weights")

    monkeypatch.setattr(module, "require_weights", require_weights)
    fleet, [first, second] = start(count=2)
    loop.run(fleet.switch(Weights([], "run/1")))
    assert not checked  # --verify-weight-sync covers these servers
    os.kill(pid_of(first), signal.SIGKILL)
    until(lambda: len(checked) == 2)
    assert loop.run(fleet.wait_for(2, 60.0)) == [first.url, second.url]
    assert checked == [("run/1", True)] * 2  # it takes no requests before


def test_new_weights_do_not_wait_for_a_server_that_hangs_while_it_loads_old_ones(start, loop, tmp_path):
    sign = tmp_path / "hang"
    fleet, [first, second] = start("--hangs-if", str(sign), count=2, weight_sync_timeout=200.0)
    loop.run(fleet.switch(Weights([], "run/1")))
    sign.touch()
    hanging = fleet._servers[0]
    os.kill(pid_of(first), signal.SIGKILL)
    until(sign.with_suffix(".reached").exists)  # it loads the weights
    assert (hanging.starts, hanging.state) == (1, State.DOWN)
    sign.unlink()
    begin = time.monotonic()
    loop.run(fleet.forget_weights())
    assert loop.run(fleet.switch(Weights([], "run/2"))) == [second.url]
    assert time.monotonic() - begin < 100  # else it waits for most of --weight-sync-timeout
    assert loop.run(fleet.wait_for(2, 60.0)) == [first.url, second.url]
    assert loop.run(VLLMClient(first.url, "key").version(timeout=60.0)) == "run/2"


@pytest.mark.slow
def test_a_server_that_dies_at_every_request_ends_the_rollout(start, loop):
    fleet, [process] = start("--exits-on-generate")
    loop.run(fleet.switch(Weights([], "run/1")))
    dispatcher = Dispatcher(
        [VLLMClient(process.url, "key")], ready=[process.url], tag="run/1", response_timeout=5.0,
        replacement_timeout=600.0, min_servers=1, check=fleet.raise_if_unrecoverable,
    )  # fmt: skip
    with pytest.raises(RolloutError, match=r"0 of 1 servers are up, and 1 are needed|a request failed 5 times"):
        loop.run(dispatcher.run([{"token_ids": [1]}] * 3, per_group=1))


def test_a_server_that_cannot_start_ends_the_run_with_its_log(start):
    message = r"it ended during its start .*server0\.log: ValueError: there is no such model"
    with pytest.raises(RolloutError, match=message):
        start("--cannot-start")


@pytest.mark.slow
def test_an_unexpected_error_of_the_supervision_ends_the_run(start, loop, monkeypatch):
    fleet, [process] = start()

    async def no_more_files(self: VLLMClient, *, timeout: float) -> str:
        raise RolloutError("too many open files")

    before = pid_of(process)
    monkeypatch.setattr(VLLMClient, "version", no_more_files)
    until(lambda: fleet._supervisors[0].done())
    with pytest.raises(RolloutError, match=r"could not be supervised: .*too many open files"):
        loop.run(fleet.wait_for(1, 60.0))
    assert pid_of(process) == before


def test_a_port_belongs_to_its_server_from_the_start_and_between_restarts(tmp_path):
    process = ServerProcess("python", [], tmp_path / "server0.log", api_key="key")
    try:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((HOST, process.port))
        with socket.create_server((HOST, process.port)):  # with SO_REUSEADDR, as vLLM's
            pass
    finally:
        process.close()
