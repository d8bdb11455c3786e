"""--rollout-timeout of one request to a server: it ends the rollout, whatever the server is busy with."""

from pathlib import Path

import pytest

from fsdptrain.errors import RolloutError
from fsdptrain.rollout.stacks import StackDump
from fsdptrain.types import Prompt, SamplingParams
from fsdptrain.vllm.server.dispatcher import Dispatcher
from fsdptrain.vllm.server.engine import Endpoints, Timeouts, VLLMServerEngine
from fsdptrain.vllm.server.fleet import Fleet, Server
from fsdptrain.vllm.server.push import FilePush
from fsdptrain.vllm.server.weight_files import WeightFolder
from tests.unit.rollout.scripted_server import ScriptedServer

GENERATE = "/inference/v1/generate"
SAMPLING = SamplingParams(num_samples=1, max_tokens=4, temperature=1.0)


def test_it_names_server_and_flag_and_is_not_sent_again():
    server = ScriptedServer()
    server.delays[GENERATE] = 60.0
    slow = Dispatcher(
        [server.client], ready=[server.client.url], tag="run/1", silence=60.0, patience=60.0, min_servers=1, longest=1.0
    )
    said = f"{server.client.url} took more than --rollout-timeout, 1 s, for one request: raise it"
    with pytest.raises(RolloutError, match=said):
        slow.run([{"token_ids": [1]}], per_group=1)
    assert server.calls.count(GENERATE) <= 1


def test_each_sending_has_the_whole_time_and_what_is_in_time_is_answered():
    dying, server = ScriptedServer(dies_after=0), ScriptedServer()
    clients = [dying.client, server.client]
    ready = [client.url for client in clients]
    made = Dispatcher(clients, ready=ready, tag="run/1", silence=60.0, patience=60.0, min_servers=1, longest=600.0)
    assert len(made.run([{"token_ids": [i]} for i in range(8)], per_group=1)) == 8


@pytest.mark.parametrize("in_flight", [False, True])
def test_an_engine_gives_it_to_its_requests(tmp_path: Path, in_flight: bool):
    server = ScriptedServer(version="default")
    fleet = Fleet([Server(server.client)], push=FilePush(), sync_timeout=60.0, start_timeout=1.0, min_servers=1)
    engine = VLLMServerEngine(
        Endpoints((server.client.url,), "run", None),
        stop_token_ids=[],
        patience=Timeouts(silence=60.0, replacement=60.0, min_servers=1, answer=1.0),
        stacks=StackDump(tmp_path / "stacks", 0),
        fleet=fleet,
        folder=WeightFolder(tmp_path / "weights", max_file_bytes=1000),
    )
    engine.update_weights([], 0)
    server.delays[GENERATE] = 60.0
    ask = engine.generate_in_flight if in_flight else engine.generate
    with pytest.raises(RolloutError, match="--rollout-timeout, 1 s"):
        ask([Prompt("a", [1, 2], "")], SAMPLING)
    engine.close()
