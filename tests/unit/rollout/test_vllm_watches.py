"""A server is watched as long as requests are out; a watch that ends by an error ends the rollout."""

import pytest

from fsdptrain.errors import RolloutError
from fsdptrain.vllm.server.client import VLLMClient
from fsdptrain.vllm.server.dispatcher import Dispatcher
from tests.unit.rollout.scripted_server import ANSWERS, ScriptedServer


def dispatcher(server: ScriptedServer) -> Dispatcher:
    return Dispatcher(
        [server.client], ready=[server.client.url], tag="run/1", silence=60.0, patience=60.0, min_servers=1
    )


def test_a_proxy_that_answers_for_a_server_is_not_waited_for(monkeypatch):
    monkeypatch.setitem(ANSWERS, "/weight_info", lambda server, body: [])
    server = ScriptedServer()
    server.delays["/inference/v1/generate"] = 60.0
    with pytest.raises(TypeError, match="list indices"):
        dispatcher(server).run([{"token_ids": [1]}], per_group=1)


def test_nor_is_a_server_that_cannot_be_asked_any_more(monkeypatch):
    def no_more_files(self: VLLMClient, *, timeout: float) -> str:
        raise RolloutError("GET /weight_info: no more files can be opened here: raise the limit (ulimit -n)")

    monkeypatch.setattr(VLLMClient, "version", no_more_files)
    server = ScriptedServer()
    server.delays["/inference/v1/generate"] = 60.0
    with pytest.raises(RolloutError, match="no more files can be opened here"):
        dispatcher(server).run([{"token_ids": [1]}], per_group=1)
