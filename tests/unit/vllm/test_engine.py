"""Requests during a weight sync get the new weights, and a closed engine ends them."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from fsdptrain.config import Config
from fsdptrain.errors import RolloutError
from fsdptrain.rollout.stacks import StackDump
from fsdptrain.types import Completion, Prompt, SamplingParams
from fsdptrain.vllm.server.engine import VLLMServerEngine
from fsdptrain.vllm.server.event_loop import EventLoop
from fsdptrain.vllm.server.fleet import Fleet, Server
from fsdptrain.vllm.server.weight_files import WeightFolder
from tests.unit.vllm.scripted_server import GENERATE, ScriptedServer

PROMPTS = [Prompt("a", [1, 2], ""), Prompt("b", [3], "")]
SAMPLING = SamplingParams(num_samples=2, max_tokens=4, temperature=1.0)


@dataclass
class Case:
    server: ScriptedServer
    engine: VLLMServerEngine
    threads: ThreadPoolExecutor
    stacks: Path

    def sync(self, version: int) -> None:
        self.engine.update_weights([("weight", torch.full((2,), float(version)))], version)

    def generate(self) -> list[Completion]:
        return self.engine.generate_in_flight(PROMPTS, SAMPLING)

    def generate_during_sync(self, version: int) -> "tuple[Future[None], Future[list[Completion]]]":
        """The sync goes on once the request waits for it."""
        hold = self.server.holds["/collective_rpc"] = threading.Event()
        before = self.server.calls.count("/collective_rpc")
        update = self.threads.submit(self.sync, version)
        while self.server.calls.count("/collective_rpc") == before:
            assert not update.done()
            time.sleep(0.01)
        request = self.generate_later()
        hold.set()
        return update, request

    def generate_later(self) -> "Future[list[Completion]]":
        """Returns when the request waits for the end of a sync."""
        request = self.threads.submit(self.generate)
        while not (request.done() or self.engine._changed._waiters):  # type: ignore[attr-defined]
            time.sleep(0.01)
        return request


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    server = ScriptedServer(version="default")
    config = Config(
        hf_checkpoint="x", rollout_engine="vllm-server", rollout_urls=[server.client.url], weight_sync_timeout=60.0,
        max_staleness=1, mismatch_correction="tis",
    )  # fmt: skip
    engine = VLLMServerEngine(
        config,
        [server.client],
        "run",
        loop=EventLoop(),
        stop_token_ids=[],
        stacks=StackDump(tmp_path / "stacks", 0),
        fleet=Fleet([Server(server.client)], config),
        folder=WeightFolder(tmp_path / "weights", max_file_bytes=1000),
    )
    with ThreadPoolExecutor() as threads:
        yield Case(server, engine, threads, tmp_path / "stacks" / "rank0.txt")
        engine.close()


def test_a_request_during_a_sync_gets_the_new_weights(case: Case) -> None:
    with pytest.raises(RolloutError, match="have no weights"):
        case.generate()
    case.sync(0)
    assert [made.policy_version for made in case.generate()] == [0] * 4
    update, request = case.generate_during_sync(1)
    made = request.result(timeout=60)
    assert [(one.prompt_id, one.policy_version) for one in made] == [("a", 1), ("a", 1), ("b", 1), ("b", 1)]
    update.result(timeout=60)


def test_a_request_during_a_sync_that_fails_gets_an_error(case: Case) -> None:
    case.sync(0)
    case.server.refuses["/collective_rpc"] = "no such weight"
    update, request = case.generate_during_sync(1)
    with pytest.raises(RolloutError, match="have no weights"):
        request.result(timeout=60)
    with pytest.raises(RolloutError, match="no such weight"):
        update.result(timeout=60)


@pytest.mark.parametrize("in_flight", [False, True])
def test_requests_have_the_time_of_rollout_timeout(case: Case, in_flight: bool) -> None:
    case.engine.request_timeout = 1.0
    case.sync(0)
    case.server.delays[GENERATE] = 60.0
    generate = case.engine.generate_in_flight if in_flight else case.engine.generate
    with pytest.raises(RolloutError, match="--rollout-timeout, 1 s"):
        generate(PROMPTS, SAMPLING)


def test_closing_ends_requests_in_flight_and_writes_their_stacks(case: Case) -> None:
    """On every rank."""
    case.sync(0)
    case.server.delays[GENERATE] = 600.0
    request = case.threads.submit(case.generate)
    while not case.server.generated:
        assert not request.done()
        time.sleep(0.01)
    case.engine.close()
    with pytest.raises(RolloutError, match="the engine is closed"):
        request.result(timeout=60)
    assert "in generate_in_flight" in case.stacks.read_text()


def test_nobody_waits_for_a_closed_engine(case: Case) -> None:
    case.sync(0)
    with case.engine._syncing():  # a sync that does not end
        request = case.generate_later()
        assert not request.done()
        case.engine.close()
        with pytest.raises(RolloutError, match="the engine is closed"):
            request.result(timeout=60)
    with pytest.raises(RolloutError, match="the engine is closed"):
        case.generate()
