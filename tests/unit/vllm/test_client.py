"""A request ends at its deadline, and every failure is a ServerError that names server and request."""

import asyncio
import json
import resource
import time
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from fsdptrain.errors import RolloutError
from fsdptrain.vllm.server.client import ServerError, ServerGoneError, ServerRefusedError, ServerSilentError
from fsdptrain.vllm.server.event_loop import EventLoop, race
from tests.event_loop import run_in_loop
from tests.unit.vllm.scripted_server import GENERATE, ScriptedServer


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.shutdown()
    server.server_close()


def test_an_answer_arrives(server):
    generation = run_in_loop(server.client.generate({"token_ids": [4, 5]}, timeout=60))
    assert (generation.token_ids, generation.versions) == ([4, 5], ["run/1", "run/1"])


def test_a_request_ends_at_its_deadline(server):
    server.delays["/is_paused"] = 60.0
    start = time.monotonic()
    with pytest.raises(ServerSilentError, match="did not answer GET /is_paused in 1 s"):
        run_in_loop(server.client.is_paused(timeout=0.7))
    assert time.monotonic() - start < 30


def test_a_request_is_cancelled_as_soon_as_it_is_not_needed(server):
    server.delays[GENERATE] = 60.0

    async def interrupted() -> None:
        interrupt = asyncio.Event()
        asyncio.get_running_loop().call_later(0.3, interrupt.set)
        await race(server.client.generate({"token_ids": [4]}), interrupt, KeyError("not needed"))

    start = time.monotonic()
    with pytest.raises(KeyError, match="not needed"):
        run_in_loop(interrupted())
    assert time.monotonic() - start < 30


def refused(message: str) -> Any:
    def prepare(server: ScriptedServer, path: str) -> None:
        server.refuses[path] = message

    return prepare


def answers(text: str) -> Any:
    def prepare(server: ScriptedServer, path: str) -> None:
        server.texts[path] = text

    return prepare


def breaks_off(server: ScriptedServer, path: str) -> None:
    server.breaks_off.add(path)


@pytest.mark.parametrize("path", ["/weight_info", GENERATE])
@pytest.mark.parametrize(
    ("prepare", "kind", "message"),
    [
        (refused("bad request"), ServerRefusedError, "status 500: .*bad request"),
        (refused("EngineDeadError"), ServerGoneError, "EngineDeadError"),
        (answers('{"broken": '), ServerRefusedError, "broken JSON"),
        (answers("[" * 9000), ServerRefusedError, "broken JSON"),
        (answers("[]"), ServerRefusedError, r"without .*\[\]"),
        (answers('{"choices": [{}]}'), ServerRefusedError, "without "),
        (answers("a page of a proxy"), ServerRefusedError, "without "),
        (breaks_off, ServerGoneError, "broke off"),
    ],
)
def test_each_failure_is_an_error_of_its_kind(path, prepare, kind, message):
    server = ScriptedServer()
    prepare(server, path)
    request: Coroutine[Any, Any, Any] = (
        server.client.generate({"token_ids": [4]}) if path == GENERATE else server.client.version(timeout=60)
    )
    with pytest.raises(ServerError, match=message) as caught:
        run_in_loop(request)
    assert type(caught.value) is kind
    assert f"{server.client.url} " in str(caught.value)
    assert f" {path} " in str(caught.value) or path in str(caught.value)


COMPLETION = {
    "token_ids": [1, 2],
    "finish_reason": "stop",
    "logprobs": {"content": [{"logprob": -1.0}, {"logprob": -2.0}]},
    "weight_versions": [{"version": "run/1", "start": 0, "end": 2}],
}


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": [1]},
        {"token_ids": ["1", "2"]},
        {"token_ids": [1, -2]},
        {"token_ids": 5},
        {"logprobs": {"content": [{"logprob": "low"}, {"logprob": 0}]}},
        {"weight_versions": [{"version": "run/1", "start": 0, "end": 10**12}]},  # must not fill the memory
        {"weight_versions": [{"version": "run/1", "start": -2, "end": 0}]},
        {"weight_versions": {"a": 1}},
        {"logprobs": [1]},
    ],
)
def test_a_completion_of_another_form_is_refused(changes):
    server = ScriptedServer()
    server.texts[GENERATE] = json.dumps({"choices": [COMPLETION]})
    assert run_in_loop(server.client.generate({"token_ids": [4]})).logprobs == [-1.0, -2.0]
    server.texts[GENERATE] = json.dumps({"choices": [COMPLETION | changes]})
    with pytest.raises(ServerRefusedError, match="without "):
        run_in_loop(server.client.generate({"token_ids": [4]}))
    server.texts[GENERATE] = json.dumps({"choices": [COMPLETION], "usage": [1]})
    with pytest.raises(ServerRefusedError, match="without "):
        run_in_loop(server.client.generate({"token_ids": [4]}))


def test_an_unfinished_completion_counts_as_a_dead_server():
    server = ScriptedServer()
    choice = '{"token_ids": [1], "finish_reason": "abort", "logprobs": {"content": [{"logprob": -1}]}, '
    server.texts[GENERATE] = (
        f'{{"choices": [{choice} "weight_versions": [{{"version": "run/1", "start": 0, "end": 1}}]}}]}}'
    )
    with pytest.raises(ServerGoneError, match="ended a completion with 'abort'"):
        run_in_loop(server.client.generate({"token_ids": [4]}))


def test_a_limit_of_this_process_is_not_blamed_on_the_server():
    server = ScriptedServer()
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def without_files() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, usual[1]))
        try:
            await server.client.version(timeout=60)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, usual)

    with pytest.raises(RolloutError, match="ulimit -n"):
        run_in_loop(without_files())


def test_a_closed_loop_ends_its_callers_with_an_error():
    loop = EventLoop()
    assert loop.run(asyncio.sleep(0, "done")) == "done"
    loop.close()
    loop.close()
    with pytest.raises(RolloutError, match="the engine is closed"):
        loop.run(asyncio.sleep(0))
