"""A thread that asks while weights are handed over waits for them, and nobody asks of an engine that is closed."""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from fsdptrain.errors import RolloutError
from fsdptrain.rollout.stacks import StackDump
from fsdptrain.types import Completion, Prompt, SamplingParams
from fsdptrain.vllm.server.engine import Endpoints, Timeouts, VLLMServerEngine
from fsdptrain.vllm.server.fleet import Fleet, Server
from fsdptrain.vllm.server.push import FilePush
from fsdptrain.vllm.server.weight_files import WeightFolder
from tests.unit.rollout.scripted_server import ScriptedServer

PROMPTS = [Prompt("a", [1, 2], ""), Prompt("b", [3], "")]
SAMPLING = SamplingParams(num_samples=2, max_tokens=4, temperature=1.0)


@dataclass
class Case:
    server: ScriptedServer
    engine: VLLMServerEngine
    threads: ThreadPoolExecutor
    stacks: Path

    def hand_over(self, version: int) -> None:
        self.engine.update_weights([("weight", torch.full((2,), float(version)))], version)

    def ask(self) -> list[Completion]:
        return self.engine.generate_in_flight(PROMPTS, SAMPLING)

    def begin_update(self, version: int) -> "Future[None]":
        """Comes back in the midst of it: the server takes its time."""
        self.server.delays["/update_weights"] = 1.0
        before = self.server.calls.count("/update_weights")
        update = self.threads.submit(self.hand_over, version)
        while self.server.calls.count("/update_weights") == before and not update.done():
            time.sleep(0.01)
        return update


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    server = ScriptedServer(version="default")
    fleet = Fleet(
        [Server(server.client)],
        push=FilePush(), sync_timeout=60.0, start_timeout=1.0, min_servers=1, keep_requests=True,
    )  # fmt: skip
    engine = VLLMServerEngine(
        Endpoints((server.client.url,), "run", None),
        stop_token_ids=[],
        patience=Timeouts(silence=60.0, replacement=1.0, min_servers=1),
        stacks=StackDump(tmp_path / "stacks", 0),
        fleet=fleet,
        folder=WeightFolder(tmp_path / "weights", max_file_bytes=1000),
    )
    with ThreadPoolExecutor() as threads:
        yield Case(server, engine, threads, tmp_path / "stacks" / "rank0.txt")
        engine.close()


def test_who_asks_during_an_update_is_answered_with_what_it_brings(case: Case) -> None:
    with pytest.raises(RolloutError, match="have no weights"):
        case.ask()
    case.hand_over(0)
    assert [made.policy_version for made in case.ask()] == [0] * 4
    update = case.begin_update(1)
    made = case.ask()
    assert [(one.prompt_id, one.policy_version) for one in made] == [("a", 1), ("a", 1), ("b", 1), ("b", 1)]
    update.result()


def test_who_asks_during_an_update_that_fails_does_not_wait_forever(case: Case) -> None:
    case.hand_over(0)
    case.server.refuses["/update_weights"] = "no such weight"
    update = case.begin_update(1)
    asked = case.threads.submit(case.ask)
    with pytest.raises(RolloutError, match="have no weights"):
        asked.result(timeout=60)
    with pytest.raises(RolloutError, match="no such weight"):
        update.result(timeout=60)


def test_a_run_that_ends_early_leaves_the_stacks_of_what_was_in_flight(case: Case) -> None:
    """On each rank: the one whose wait was too long, and those that must end with it."""
    case.hand_over(0)
    case.server.delays["/inference/v1/generate"] = 600.0
    asked = case.threads.submit(case.ask)
    while not case.server.given:
        assert not asked.done()
        time.sleep(0.01)
    case.engine.close()
    with pytest.raises(Exception, match=r"given up|has ended"):
        asked.result(timeout=60)
    assert "in generate_in_flight" in case.stacks.read_text()


def test_once_it_is_closed_nobody_begins_and_nobody_waits(case: Case) -> None:
    case.hand_over(0)
    with case.engine._no_weights():  # an update that does not end
        asked = case.threads.submit(case.ask)
        time.sleep(0.2)
        assert not asked.done()
        case.engine.close()
        with pytest.raises(RolloutError, match="the engine is closed"):
            asked.result(timeout=60)
    with pytest.raises(RolloutError, match="the engine is closed"):
        case.ask()
