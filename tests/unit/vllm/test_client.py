"""A request ends at its deadline, and every failure is a RolloutError that names server and request."""

import asyncio
import time
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from fsdptrain.errors import RolloutError
from fsdptrain.vllm.server.client import VLLMClient
from fsdptrain.vllm.server.event_loop import EventLoop
from tests.event_loop import run_in_loop
from tests.unit.vllm.scripted_server import GENERATE, ScriptedServer

pytestmark = pytest.mark.slow


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.shutdown()
    server.server_close()


def test_a_request_ends_at_its_deadline(server):
    server.delays = {"/weight_info": 60.0, GENERATE: 60.0}
    start = time.monotonic()
    with pytest.raises(RolloutError, match="did not answer GET /weight_info in 1 s"):
        run_in_loop(server.client.version(timeout=0.7))
    with pytest.raises(RolloutError, match="in 1 s; generate fewer tokens"):
        run_in_loop(server.client.post(GENERATE, timeout=0.7, hint="; generate fewer tokens"))
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("path", ["/weight_info", GENERATE])
@pytest.mark.parametrize(
    ("fault", "text", "message"),
    [
        ("refuses", "bad request", "status 500: .*bad request"),
        ("texts", '{"broken": ', "without .*broken"),
        ("texts", "[]", r"without .*\[\]"),
        ("texts", "a page of a proxy", "without .*page of a proxy"),
        ("breaks_off", "", "ended the connection"),
    ],
)
def test_each_failure_is_an_error_that_names_the_server(server, path, fault, text, message):
    setattr(server, fault, {path: text})
    request: Coroutine[Any, Any, Any] = (
        server.client.post(GENERATE, {"token_ids": [4]}, "choices", timeout=60)
        if path == GENERATE
        else server.client.version(timeout=60)
    )
    with pytest.raises(RolloutError, match=message) as caught:
        run_in_loop(request)
    assert f"{server.client.url} " in str(caught.value)
    assert path in str(caught.value)


def test_the_error_of_a_server_of_the_run_shows_the_end_of_its_log(server, tmp_path):
    log = tmp_path / "server0.log"
    log.write_text("starting\nOutOfMemoryError: 2 GiB\nbye\n")
    server.breaks_off.add("/weight_info")
    with pytest.raises(RolloutError, match=r"ended the connection .* \(.*server0.log: OutOfMemoryError: 2 GiB\)"):
        run_in_loop(VLLMClient(server.client.url, log=log).version(timeout=60))


def test_a_closed_loop_ends_its_callers_with_an_error():
    loop = EventLoop()
    assert loop.run(asyncio.sleep(0, "done")) == "done"
    loop.close()
    loop.close()
    with pytest.raises(RolloutError, match="the engine is closed"):
        loop.run(asyncio.sleep(0))
