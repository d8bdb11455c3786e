"""Each request is answered once and in its place, whatever becomes of servers; or the rollout ends with one line."""

import os
import resource
import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdptrain.errors import RolloutError
from fsdptrain.testing import spawn
from fsdptrain.vllm.server import dispatcher as vllm_requests
from fsdptrain.vllm.server.client import ServerGoneError
from fsdptrain.vllm.server.dispatcher import Dispatcher
from tests.unit.rollout.scripted_server import ANSWERS, ScriptedServer

GENERATE = "/inference/v1/generate"


def dispatcher(*servers: ScriptedServer, **options) -> Dispatcher:
    clients = [server.client for server in servers]
    values = {"silence": 30.0, "patience": 30.0, "min_servers": 1, "tag": "run/1", **options}
    return Dispatcher(clients, ready=[client.url for client in clients], **values)


def requests(count: int) -> list[dict]:
    return [{"token_ids": [i]} for i in range(count)]


def tokens(answers: list) -> list[int]:
    return [answer["choices"][0]["token_ids"][0] for answer in answers]


@settings(max_examples=15, deadline=None)
@given(
    deaths=st.lists(st.integers(0, 12), max_size=3),
    count=st.integers(1, 40),
    per_group=st.integers(1, 8),
    first=st.integers(0, 5),
)
def test_every_request_has_its_own_answer_while_one_server_lives(deaths, count, per_group, first):
    servers = [*(ScriptedServer(dies_after=number) for number in deaths), ScriptedServer()]
    answers = dispatcher(*servers, first=first).run(requests(count), per_group=per_group)
    assert tokens(answers) == list(range(count))
    for server in servers:
        server.shutdown()
        server.server_close()


def with_few_files() -> list[int]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 60, 500))
    return tokens(dispatcher(ScriptedServer()).run(requests(300), per_group=1))


def test_more_requests_than_files_may_be_open_are_answered_all():
    assert spawn(1, with_few_files) == [list(range(300))]


def test_samples_of_a_prompt_go_to_one_server_and_prompts_are_spread():
    servers = [ScriptedServer(), ScriptedServer()]
    dispatcher(*servers).run(requests(40), per_group=4)
    for server in servers:
        groups = [body["token_ids"][0] // 4 for body in server.given]
        assert all(groups.count(group) == 4 for group in groups)
        assert 8 <= len(server.given) <= 32


def test_without_servers_it_ends_when_patience_does():
    server = ScriptedServer(dies_after=3)
    start = time.monotonic()
    with pytest.raises(RolloutError, match=r"0 of 1 servers answer, for 1 s now, .*--min-servers"):
        dispatcher(server, patience=1.0).run(requests(10), per_group=1)
    assert time.monotonic() - start < 30


def test_fewer_than_the_least_number_end_it_too():
    servers = [ScriptedServer(dies_after=0), ScriptedServer()]
    servers[1].delays[GENERATE] = 60.0
    slow = dispatcher(*servers, min_servers=2, patience=0.0)
    with pytest.raises(RolloutError, match="1 of 2 servers answer"):
        slow.run(requests(20), per_group=1)


def test_what_a_server_refuses_is_not_sent_again():
    server = ScriptedServer()
    server.refuses[GENERATE] = "this prompt is too long"
    with pytest.raises(RolloutError, match="this prompt is too long"):
        dispatcher(server).run(requests(1), per_group=1)
    assert server.calls.count(GENERATE) == 1


@pytest.mark.parametrize("fault", [{"version": "run/0"}, {"paused": True}])
def test_a_server_with_other_weights_or_paused_by_somebody_is_not_used(fault):
    other, right = ScriptedServer(**fault), ScriptedServer()
    made = dispatcher(other, right)
    assert tokens(made.run(requests(30), per_group=1)) == list(range(30))
    if "version" in fault:  # its answers show it
        with pytest.raises(RolloutError, match="run/0, not run/1"):
            dispatcher(other, patience=1.0).run(requests(1), per_group=1)


def test_requests_in_flight_live_on_while_servers_take_new_weights():
    """Between two versions a watch says nothing, whatever it sees; afterwards only older answers are refused."""
    server = ScriptedServer(version="run/3")
    seen = {"now": "run/3"}
    made = dispatcher(server, tag="run/2", newest=lambda: seen["now"])
    assert made._now() == "run/3"
    assert tokens(made.run(requests(20), per_group=4)) == list(range(20))
    assert all(made._is_good(tag) for tag in ("run/2", "run/10"))
    assert not any(made._is_good(tag) for tag in ("run/1", "other/3", "default"))
    server.version = "run/1"
    with pytest.raises(RolloutError, match="run/1, not run/"):
        dispatcher(server, tag="run/2", newest=lambda: "run/3", patience=1.0).run(requests(1), per_group=1)


def test_a_watch_during_an_update_marks_nobody():
    server = ScriptedServer(version="run/1", paused=True)
    made = dispatcher(server, newest=lambda: None)
    assert tokens(made.run(requests(8), per_group=1)) == list(range(8))


def test_what_is_sent_again_finds_nothing_of_itself_in_a_cache(monkeypatch):
    monkeypatch.setattr(vllm_requests, "_PROBE_INTERVAL_S", 0.05)
    right, server = ANSWERS[GENERATE], ScriptedServer()
    versions = iter(["run/0"])  # its first answer is not taken

    def generated(server: ScriptedServer, body: Any) -> Any:
        answer = right(server, body)
        answer["choices"][0]["weight_versions"][0]["version"] = next(versions, server.version)
        return answer

    monkeypatch.setitem(ANSWERS, GENERATE, generated)
    dispatcher(server).run([{"token_ids": [1], "cache_salt": "probe"}], per_group=1)
    assert [body["cache_salt"] for body in server.given] == ["probe", "probe-1"]


def test_what_is_stopped_from_outside_ends():
    server = ScriptedServer(dies_after=0)
    made = dispatcher(server, patience=60.0, min_servers=1)
    threading.Timer(0.3, made.stop).start()
    start = time.monotonic()
    with pytest.raises((RolloutError, ServerGoneError)):
        made.run(requests(4), per_group=1)
    assert time.monotonic() - start < 30
