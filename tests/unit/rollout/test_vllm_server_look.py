"""Which servers of a user may be spoken to, and which are refused with a reason."""

import logging
import threading
from functools import partial
from typing import Any

import pytest

from fsdptrain.config import Config
from fsdptrain.errors import ConfigError
from fsdptrain.vllm.server.checks import look_at, require_fitting, require_private
from fsdptrain.vllm.server.client import VLLMClient
from fsdptrain.vllm.server.fleet import Fleet, Server, State
from fsdptrain.vllm.server.push import FilePush
from tests.unit.rollout.scripted_server import ANSWERS, FITTING, ScriptedServer

PRIVATE = ["127.0.0.1", "localhost", "10.1.2.3", "192.168.0.7", "172.16.5.5", "::1", "fd00::1"]
PUBLIC = ["8.8.8.8", "2001:4860:4860::8888"]


@pytest.mark.parametrize("host", [*PRIVATE, *PUBLIC])
def test_only_loopback_and_private_addresses_are_spoken_to_unless_asked_for(host):
    def refusal(allow_public: bool) -> str:
        try:
            require_private(host, "http://there", allow_public=allow_public)
        except ConfigError as error:
            return str(error)
        return ""

    assert ("--rollout-public-servers" in refusal(allow_public=False)) == (host in PUBLIC)
    assert refusal(allow_public=True) == ""


def config(**values) -> Config:
    return Config(hf_checkpoint="x", rollout_engine="vllm-server", **values)


def test_a_server_that_is_not_there_is_left_behind_while_enough_are():
    urls = [ScriptedServer().client.url, "http://127.0.0.1:9"]

    def states(min_servers: int) -> list[State]:
        servers = [Server(VLLMClient(url)) for url in urls]
        look_at(servers, config(rollout_urls=urls, bf16=False, min_servers=min_servers))
        return [server.state for server in servers]

    assert states(1) == [State.UP, State.DOWN]
    with pytest.raises(ConfigError, match=r"127.0.0.1:9 broke off .*--min-servers 2 says how many are needed"):
        states(2)


def test_one_that_does_not_fit_is_refused_also_when_it_comes_back():
    server = ScriptedServer(version="default")
    given = config(rollout_urls=[server.client.url], bf16=False, max_staleness=1, mismatch_correction="tis")
    require_fitting(server.client, given)
    server.info = FITTING | {"scheduler_config": {"policy": "fcfs"}}
    with pytest.raises(ConfigError, match=r"must be started with --scheduling-policy priority \(it has fcfs\)"):
        require_fitting(server.client, given)
    left = Server(server.client, state=State.DOWN)
    fleet = Fleet(
        [left],
        push=FilePush(),
        sync_timeout=5.0,
        start_timeout=5.0,
        min_servers=1,
        require_fitting=partial(require_fitting, config=given),
    )
    fleet._take_back()
    assert left.state is State.DOWN
    server.info = FITTING
    fleet._take_back()
    assert left.state is State.UP


def test_one_server_by_two_addresses_is_refused():
    server = ScriptedServer()
    urls = [server.client.url, server.client.url.replace("127.0.0.1", "localhost")]
    with pytest.raises(ConfigError, match=f"{urls[0]} and {urls[1]} are one server: name it once"):
        look_at([Server(VLLMClient(url)) for url in urls], config(rollout_urls=urls, bf16=False))


@pytest.mark.parametrize("guarded", [False, True])
def test_one_that_obeys_whoever_reaches_it_is_told_of(guarded, caplog):
    server = ScriptedServer()
    if guarded:
        server.refuses["/is_paused"] = "the API key is missing"
    far = server.client.url.replace("127.0.0.1", "0.0.0.0")  # also this machine, and no loopback address
    with caplog.at_level(logging.WARNING, logger="fsdptrain"):
        look_at([Server(VLLMClient(far))], config(rollout_urls=[far], bf16=False))
        look_at([Server(server.client)], config(rollout_urls=[server.client.url], bf16=False))
        look_at([Server(VLLMClient(far))], config(rollout_urls=[far], bf16=False, rollout_public_servers=True))
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (not guarded)
    assert all(f"--rollout-urls {far}: whoever reaches it" in line for line in told)


def test_all_are_looked_at_at_one_time_so_that_waits_do_not_add_up(monkeypatch):
    all_asked = threading.Barrier(4)

    def describe(server: ScriptedServer, body: Any) -> Any:
        all_asked.wait(timeout=60)
        return {"vllm_config": server.info}

    monkeypatch.setitem(ANSWERS, "/server_info", describe)
    urls = [ScriptedServer().client.url for _ in range(4)]
    servers = [Server(VLLMClient(url)) for url in urls]
    look_at(servers, config(rollout_urls=urls, bf16=False))
    assert {server.state for server in servers} == {State.UP}


@pytest.mark.parametrize(("sync_timeout", "longest"), [(5.0, 5.0), (300.0, 120.0)])
def test_one_that_comes_back_is_looked_at_within_the_time_that_other_ranks_wait_for(sync_timeout, longest):
    asked: list[float] = []
    fleet = Fleet(
        [Server(ScriptedServer(version="default").client, state=State.DOWN)],
        push=FilePush(), sync_timeout=sync_timeout, start_timeout=5.0, min_servers=1,
        require_fitting=lambda client, timeout: asked.append(timeout),
    )  # fmt: skip
    fleet._take_back()
    assert 0 < asked[0] <= longest


def test_what_nobody_has_foreseen_of_one_that_comes_back_is_told(monkeypatch):
    monkeypatch.setitem(ANSWERS, "/weight_info", lambda server, body: [])
    left = Server(ScriptedServer().client, state=State.DOWN)
    fleet = Fleet([left], push=FilePush(), sync_timeout=60.0, start_timeout=5.0, min_servers=1)
    with pytest.raises(TypeError, match="list indices"):
        fleet._take_back()
