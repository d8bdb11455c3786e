"""All servers switch version together, or the run stops and says which did not."""

import time

import pytest

from fsdptrain.errors import RolloutError
from fsdptrain.vllm.server import fleet as vllm_fleet
from fsdptrain.vllm.server.fleet import Fleet, Server
from fsdptrain.vllm.server.push import FilePush, Weights
from tests.unit.rollout.scripted_server import ANSWERS, ScriptedServer

pytestmark = pytest.mark.slow

WEIGHTS = Weights([], "run/2")


def fleet(*servers: ScriptedServer, min_servers: int = 1, sync_timeout: float = 60.0) -> Fleet:
    return Fleet(
        [Server(server.client) for server in servers],
        push=FilePush(), sync_timeout=sync_timeout, start_timeout=1.0, min_servers=min_servers,
    )  # fmt: skip


def test_each_is_stopped_updated_and_asked_for_its_version_before_any_goes_on():
    servers = [ScriptedServer(), ScriptedServer()]
    assert fleet(*servers).switch(WEIGHTS) == [server.client.url for server in servers]
    order = """/pause /weight_info /collective_rpc /start_weight_update /update_weights /finish_weight_update
        /reset_prefix_cache /weight_info /resume"""
    assert [server.calls for server in servers] == [order.split()] * 2


@pytest.mark.parametrize("path", ["/start_weight_update", "/update_weights", "/finish_weight_update", "/weight_info"])
def test_one_that_answers_and_does_not_switch_stops_the_run_and_none_goes_on(path):
    good, bad = ScriptedServer(), ScriptedServer()
    bad.refuses[path] = "no such weight"
    with pytest.raises(RolloutError) as caught:
        fleet(good, bad).switch(WEIGHTS)
    message = str(caught.value)
    assert f"{bad.client.url} answered" in message
    assert f"and not used: {good.client.url}" in message
    assert "\n" not in message
    assert "/resume" not in [*good.calls, *bad.calls]
    assert all(bad.calls.count(call) == 1 for call in bad.calls if call != "/health")


def test_prefixes_that_stay_cached_stop_the_run(monkeypatch):
    monkeypatch.setitem(ANSWERS, "/reset_prefix_cache", lambda server, body: {"success": False})
    with pytest.raises(RolloutError, match="did not forget its cached prefixes"):
        fleet(ScriptedServer()).switch(WEIGHTS)


def test_the_dead_are_left_behind_while_enough_are_there():
    dead, alive = ScriptedServer(dies_after=0), ScriptedServer()
    assert fleet(dead, alive).switch(WEIGHTS) == [alive.client.url]
    with pytest.raises(RolloutError, match=rf"1 of 2 servers are there, and 2 are needed .*{dead.client.url}"):
        fleet(dead, alive, min_servers=2).switch(WEIGHTS)


def test_one_that_was_started_anew_is_taken_back_and_one_that_only_woke_up_is_not(monkeypatch):
    """The latter may hold half an update."""
    monkeypatch.setattr(vllm_fleet, "_TAKE_BACK_S", 60.0)
    gone, alive = ScriptedServer(), ScriptedServer()
    servers = fleet(gone, alive)
    gone.dies_after = 0
    assert servers.switch(WEIGHTS) == [alive.client.url]
    gone.dies_after = None
    assert servers.switch(WEIGHTS) == [alive.client.url]
    gone.version = "default"
    assert servers.switch(WEIGHTS) == [gone.client.url, alive.client.url]


def test_those_that_hang_cost_no_other_its_time():
    """Who has switched must still be told to go on, and may take a moment."""
    paths, alive = ("/pause", "/update_weights", "/weight_info"), ScriptedServer()
    hanging = [ScriptedServer() for _ in paths]
    for server, path in zip(hanging, paths, strict=True):
        server.delays[path] = 60.0
    alive.delays["/resume"] = 0.2
    start = time.monotonic()
    assert fleet(*hanging, alive, sync_timeout=12.0).switch(WEIGHTS) == [alive.client.url]
    assert time.monotonic() - start < 15  # the deadline of the switch is 12
    assert alive.calls[-1] == "/resume"


def test_one_that_holds_the_version_before_gets_what_has_changed_and_any_other_everything(tmp_path):
    has_it, has_another = ScriptedServer(version="run/1"), ScriptedServer(version="default")
    whole, changed = [tmp_path / "a", tmp_path / "b"], [tmp_path / "b"]
    fleet(has_it, has_another).switch(Weights(whole, "run/2", changed, "run/1"))
    assert has_it.updates == [{"partial": True}, {"paths": [str(path) for path in changed]}]
    assert has_another.updates == [{"paths": [str(path) for path in whole]}]
