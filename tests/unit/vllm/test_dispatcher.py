"""Every request is answered once and in its place, whatever happens to servers; or the rollout ends with one line."""

import os
import resource
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdptrain.errors import RolloutError
from fsdptrain.vllm.server import dispatcher as module
from fsdptrain.vllm.server.client import VLLMClient
from fsdptrain.vllm.server.dispatcher import Dispatcher
from tests.event_loop import run_in_loop
from tests.testing import spawn
from tests.unit.vllm.scripted_server import ANSWERS, GENERATE, ScriptedServer


def dispatcher(*servers: ScriptedServer, **options: Any) -> Dispatcher:
    clients = [server.client for server in servers]
    values = {"response_timeout": 30.0, "replacement_timeout": 30.0, "min_servers": 1, "tag": "run/1", **options}
    return Dispatcher(clients, ready=[client.url for client in clients], **values)


def run(made: Dispatcher, count: int, *, per_group: int = 1, first: int = 0) -> list[int]:
    """The first token of each answer, which is the number of its request."""
    requests = [{"token_ids": [i]} for i in range(count)]
    answers = run_in_loop(made.run(requests, per_group=per_group, first=first))
    return [generation.token_ids[0] for generation in answers]


@settings(max_examples=15, deadline=None)
@given(
    deaths=st.lists(st.integers(0, 12), max_size=3),
    count=st.integers(1, 40),
    per_group=st.integers(1, 8),
    first=st.integers(0, 5),
)
def test_every_request_gets_its_own_answer_while_one_server_lives(deaths, count, per_group, first):
    servers = [*(ScriptedServer(dies_after=number) for number in deaths), ScriptedServer()]
    assert run(dispatcher(*servers), count, per_group=per_group, first=first) == list(range(count))
    for server in servers:
        server.shutdown()
        server.server_close()


def with_few_files() -> list[int]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 60, 500))
    return run(dispatcher(ScriptedServer()), 300)


def test_more_requests_than_open_files_are_all_answered():
    assert spawn(1, with_few_files) == [list(range(300))]


def test_samples_of_a_prompt_go_to_one_server_and_prompts_are_distributed():
    servers = [ScriptedServer(), ScriptedServer()]
    run(dispatcher(*servers), 40, per_group=4)
    for server in servers:
        groups = [body["token_ids"][0] // 4 for body in server.generated]
        assert all(groups.count(group) == 4 for group in groups)
        assert 8 <= len(server.generated) <= 32


def test_the_rollout_ends_when_servers_are_not_replaced_in_time():
    start = time.monotonic()
    with pytest.raises(RolloutError, match=r"0 of 1 servers are up after 1 s, .*--min-servers is 1"):
        run(dispatcher(ScriptedServer(dies_after=3), replacement_timeout=1.0), 10)
    servers = [ScriptedServer(dies_after=0), ScriptedServer()]
    servers[1].delays[GENERATE] = 60.0
    with pytest.raises(RolloutError, match="1 of 2 servers are up"):
        run(dispatcher(*servers, min_servers=2, replacement_timeout=0.0), 20)
    assert time.monotonic() - start < 30


def test_a_refused_request_is_not_resent():
    server = ScriptedServer()
    server.refuses[GENERATE] = "this prompt is too long"
    with pytest.raises(RolloutError, match="this prompt is too long"):
        run(dispatcher(server), 1)
    assert server.calls.count(GENERATE) == 1


def test_a_request_over_its_time_ends_the_rollout_and_each_try_has_the_whole_time():
    slow = ScriptedServer()
    slow.delays[GENERATE] = 60.0
    message = f"{slow.client.url} took more than --rollout-timeout, 1 s, for one request: raise it"
    with pytest.raises(RolloutError, match=message):
        run(dispatcher(slow, request_timeout=1.0), 1)
    assert slow.calls.count(GENERATE) == 1
    made = dispatcher(ScriptedServer(dies_after=0), ScriptedServer(), request_timeout=600.0)
    assert run(made, 8) == list(range(8))


@pytest.mark.parametrize("fault", [{"version": "run/0"}, {"paused": True}])
def test_a_server_with_other_weights_or_paused_by_somebody_is_not_used(fault):
    other = ScriptedServer(**fault)
    assert run(dispatcher(other, ScriptedServer()), 30) == list(range(30))
    if "version" in fault:
        with pytest.raises(RolloutError, match="run/0, not run/1"):
            run(dispatcher(other, replacement_timeout=1.0), 1)


def test_requests_in_flight_survive_a_weight_sync():
    """During the sync health checks decide nothing; afterwards only older weights are rejected."""
    server = ScriptedServer(version="run/3")
    made = dispatcher(server, tag="run/2", newest=lambda: "run/3")
    assert run(made, 20, per_group=4) == list(range(20))
    assert all(made._is_current(tag) for tag in ("run/2", "run/10"))
    assert not any(made._is_current(tag) for tag in ("run/1", "other/3", "default"))
    server.version = "run/1"
    with pytest.raises(RolloutError, match="run/1, not run/"):
        run(dispatcher(server, tag="run/2", newest=lambda: "run/3", replacement_timeout=1.0), 1)
    assert run(dispatcher(ScriptedServer(paused=True), newest=lambda: None), 8) == list(range(8))


def test_a_resent_request_has_another_cache_salt(monkeypatch):
    monkeypatch.setattr(module, "_PROBE_INTERVAL_S", 0.05)
    right, server, versions = ANSWERS[GENERATE], ScriptedServer(), iter(["run/0"])  # the first answer is rejected

    def answer(server: ScriptedServer, body: Any) -> Any:
        found = right(server, body)
        found["choices"][0]["weight_versions"][0]["version"] = next(versions, server.version)
        return found

    monkeypatch.setitem(ANSWERS, GENERATE, answer)
    run_in_loop(dispatcher(server).run([{"token_ids": [1], "cache_salt": "probe"}], per_group=1))
    assert [body["cache_salt"] for body in server.generated] == ["probe", "probe-1"]


def test_a_hung_server_is_noticed_and_its_requests_go_elsewhere():
    hung, server = ScriptedServer(), ScriptedServer()
    hung.delays = {GENERATE: 60.0, "/weight_info": 60.0}
    start = time.monotonic()
    assert run(dispatcher(hung, server, response_timeout=1.0), 8) == list(range(8))
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("text", ["[]", '{"broken": ', "a page of a proxy"])
def test_a_proxy_that_answers_for_a_server_does_not_stop_the_others(text):
    proxy = ScriptedServer()
    proxy.texts["/weight_info"] = text
    proxy.delays[GENERATE] = 60.0
    assert run(dispatcher(proxy, ScriptedServer()), 8) == list(range(8))
    with pytest.raises(RolloutError, match=f"0 of 1 servers are up .*{proxy.client.url} answered GET /weight_info"):
        run(dispatcher(proxy, replacement_timeout=1.0), 1)


def test_an_error_of_a_health_check_itself_ends_the_rollout(monkeypatch):
    async def no_more_files(self: VLLMClient, *, timeout: float) -> str:
        raise RolloutError("too many open files")

    monkeypatch.setattr(VLLMClient, "version", no_more_files)
    server = ScriptedServer()
    server.delays[GENERATE] = 60.0
    with pytest.raises(RolloutError, match="too many open files"):
        run(dispatcher(server), 1)
