"""Servers switch their weights together, every request gets its own answer, and a server that fails ends the run."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.errors import RolloutError
from fsdptrain.types import Completion, Prompt, SamplingParams
from fsdptrain.vllm.server.engine import VLLMServerEngine
from fsdptrain.vllm.server.event_loop import EventLoop
from fsdptrain.vllm.server.transfer import over_file
from fsdptrain.vllm.weight_file import WeightFile
from tests.testing import wait_until
from tests.unit.vllm.scripted_server import ANSWERS, GENERATE, ScriptedServer

pytestmark = pytest.mark.slow

LOAD = "/update_weights"
PROMPTS = [Prompt("a", [1, 2], ""), Prompt("b", [3], "")]
SAMPLING = SamplingParams(num_samples=2, max_tokens=4, temperature=1.0)


@dataclass
class Case:
    servers: list[ScriptedServer]
    engine: VLLMServerEngine
    threads: ThreadPoolExecutor

    @property
    def server(self) -> ScriptedServer:
        return self.servers[0]

    def sync(self, version: int) -> None:
        self.engine.update_weights([("weight", torch.full((2,), float(version)))], version)

    def generate(self) -> list[Completion]:
        return self.engine.generate_in_flight(PROMPTS, SAMPLING)

    def generate_during_sync(self, version: int) -> "tuple[Future[None], Future[list[Completion]]]":
        """The sync goes on once the request waits for it."""
        hold = self.server.holds[LOAD] = threading.Event()
        before = self.server.calls.count(LOAD)
        update = self.threads.submit(self.sync, version)
        while self.server.calls.count(LOAD) == before:
            assert not update.done()
            time.sleep(0.01)
        request = self.generate_later()
        hold.set()
        return update, request

    def generate_later(self) -> "Future[list[Completion]]":
        """Returns when the request waits for the end of a sync."""
        request = self.threads.submit(self.generate)
        while not (request.done() or self.engine._is_open._waiters):  # type: ignore[attr-defined]
            time.sleep(0.01)
        return request


@pytest.fixture(scope="module", autouse=True)
def _alone() -> Iterator[None]:
    with platform.process_group(600):
        yield


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Case]]:
    with ThreadPoolExecutor() as threads:
        engines = []

        def made(num_servers: int = 1, **options: Any) -> Case:
            servers = [ScriptedServer(version="default") for _ in range(num_servers)]
            urls = [server.client.url for server in servers]
            values = {"weight_sync_timeout": 60.0, "max_staleness": 1, "mismatch_correction": "tis", **options}
            engine = VLLMServerEngine(
                Config(hf_checkpoint="x", rollout_engine="vllm-server", rollout_urls=urls, **values),
                [server.client for server in servers],
                "run",
                loop=EventLoop(),
                transfer=partial(over_file, WeightFile(tmp_path / "weights")),
                stop_token_ids=[],
                cleanup=ExitStack(),
            )
            engines.append(engine)
            return Case(servers, engine, threads)

        yield made
        for engine in engines:
            engine.close()


@pytest.fixture
def case(make: Callable[..., Case]) -> Case:
    return make()


def test_each_server_is_paused_updated_and_checked_before_any_resumes(make: Callable[..., Case]) -> None:
    case = make(2)
    slow, fast = case.servers
    slow.holds["/weight_info"] = threading.Event()
    update = case.threads.submit(case.sync, 1)
    wait_until(lambda: "/weight_info" in fast.calls)
    time.sleep(0.1)
    order = "/pause /start_weight_update /update_weights /finish_weight_update /collective_rpc /weight_info"
    assert fast.calls == order.split()
    slow.holds["/weight_info"].set()
    update.result(timeout=60)
    assert [server.calls for server in case.servers] == [[*order.split(), "/resume"]] * 2


NO_SWITCH: dict[str, Callable[[ScriptedServer], object]] = {
    "refuses": lambda bad: bad.refuses.update({LOAD: "no such weight"}),
    "cannot load": lambda bad: bad.texts.update({"/collective_rpc": '{"results": [[null, {}], ["no weight", {}]]}'}),
    "broken JSON": lambda bad: bad.texts.update({"/weight_info": '{"broken": '}),
    "dead": lambda bad: setattr(bad, "dies_after", 0),
    "hangs": lambda bad: bad.delays.update({LOAD: 60.0}),
}


@pytest.mark.parametrize("fault", NO_SWITCH)
def test_a_server_that_does_not_switch_ends_the_run_and_none_resumes(make: Callable[..., Case], fault: str) -> None:
    case = make(2, weight_sync_timeout=1.5 if fault == "hangs" else 60.0)
    good, bad = case.servers
    NO_SWITCH[fault](bad)
    start = time.monotonic()
    with pytest.raises(RolloutError) as caught:
        case.sync(1)
    assert time.monotonic() - start < 30
    message = str(caught.value)
    assert f"not all servers took the new weights in {case.engine.response_timeout:g} s" in message
    assert bad.client.url in message
    assert "\n" not in message
    assert "/resume" not in [*good.calls, *bad.calls]
    assert max(map(bad.calls.count, bad.calls), default=1) == 1  # nothing is retried


def test_every_request_gets_its_own_answer_and_samples_of_a_prompt_go_to_one_server(make: Callable[..., Case]) -> None:
    case = make(2)
    case.sync(0)
    prompts = [Prompt(str(i), [i, i + 100], "") for i in range(20)]
    made = case.engine.generate(prompts, SAMPLING)
    assert [one.token_ids for one in made] == [[i, i + 100] for i in range(20) for _ in range(2)]
    for server in case.servers:
        numbers = [body["token_ids"][0] for body in server.generated]
        assert all(numbers.count(number) == 2 for number in numbers)
        assert len(numbers) == 20
    assert not any(case.engine._num_in_flight.values())


def test_calls_of_an_episode_prefer_one_server_and_episodes_any(make: Callable[..., Case]) -> None:
    engine = make(3).engine
    for row in ("gsm8k:17", "gsm8k:17@3", "someone@example.org"):
        episodes = [{engine._choose(Prompt(f"{row}#{i}@{call}", [1], "")).url for call in range(4)} for i in range(64)]
        assert {len(urls) for urls in episodes} == {1}
        assert set().union(*episodes) == {client.url for client in engine.clients}


@pytest.mark.parametrize("fault", ["dies", "refuses", "holds other weights"])
def test_a_server_that_fails_ends_the_rollout_with_one_line(make: Callable[..., Case], fault: str) -> None:
    case = make(2)
    case.sync(3)
    good, bad = case.servers
    if fault == "dies":
        bad.dies_after, words = 0, "ended the connection"
        good.delays[GENERATE] = 60.0  # is not waited for
    elif fault == "refuses":
        bad.refuses[GENERATE], words = "EngineDeadError", "EngineDeadError"
    else:
        bad.version, words = "other/3", "answered with weights other/3, not run/3"
    start = time.monotonic()
    with pytest.raises(RolloutError) as caught:
        case.engine.generate(PROMPTS, SAMPLING)
    assert time.monotonic() - start < 30
    assert words in str(caught.value)
    assert bad.client.url in str(caught.value)
    assert "\n" not in str(caught.value)
    assert good.calls.count(GENERATE) + bad.calls.count(GENERATE) <= 4  # nothing is sent again


COMPLETION = {
    "token_ids": [1, 2],
    "finish_reason": "stop",
    "logprobs": {"content": [{"logprob": -1.0}, {"logprob": -2.0}]},
    "weight_versions": [{"version": "run/0", "start": 0, "end": 2}],
}


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": [1]},
        {"token_ids": 5},
        {"token_ids": [], "logprobs": {"content": []}, "weight_versions": []},
        {"logprobs": {"content": [{"logprob": "low"}, {"logprob": 0}]}},
        {"weight_versions": None},
        {"logprobs": [1]},
        {"finish_reason": "abort"},
    ],
)
def test_a_completion_of_another_form_is_refused(case: Case, changes: dict[str, Any]) -> None:
    case.sync(0)
    case.server.texts[GENERATE] = json.dumps({"choices": [COMPLETION]})
    assert case.generate()[0].logprobs == [-1.0, -2.0]
    case.server.texts[GENERATE] = json.dumps({"choices": [COMPLETION | changes]})
    with pytest.raises(RolloutError, match=r"without |ended the completion of prompt 'a' with 'abort'"):
        case.generate()


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_request_has_the_time_of_rollout_timeout(case: Case, in_flight: bool) -> None:
    case.engine.request_timeout = 1.0
    case.sync(0)
    case.server.delays[GENERATE] = 60.0
    generate = case.engine.generate_in_flight if in_flight else case.engine.generate
    with pytest.raises(RolloutError, match="in 1 s; raise --rollout-timeout"):
        generate(PROMPTS, SAMPLING)


def test_a_server_that_hangs_is_noticed_before_rollout_timeout_and_a_slow_one_is_waited_for(case: Case) -> None:
    case.sync(0)
    case.engine.response_timeout = 0.3
    case.server.delays[GENERATE] = 2.0
    assert len(case.generate()) == 4
    assert case.server.calls.count("/weight_info") > 1  # it is alive
    case.server.delays = {GENERATE: 600.0, "/weight_info": 600.0}
    with pytest.raises(RolloutError, match="did not answer GET /weight_info"):
        case.generate()


def test_what_the_trainer_waits_for_precedes_requests_in_flight(case: Case) -> None:
    """For example an evaluation."""
    case.sync(0)
    case.generate()
    case.engine.generate(PROMPTS, SAMPLING)
    assert [body.get("priority", 0) for body in case.server.generated] == [0] * 4 + [-1] * 4


def test_a_request_during_a_sync_gets_the_new_weights(case: Case) -> None:
    with pytest.raises(RolloutError, match="have no weights"):
        case.generate()
    case.sync(0)
    assert [made.policy_version for made in case.generate()] == [0] * 4
    update, request = case.generate_during_sync(1)
    made = request.result(timeout=60)
    assert [(one.prompt_id, one.policy_version) for one in made] == [("a", 1), ("a", 1), ("b", 1), ("b", 1)]
    update.result(timeout=60)


@pytest.mark.parametrize(("first", "second"), [("run/2", "run/3"), ("run/1", "run/2"), ("other/2", "run/3")])
def test_a_request_across_a_sync_may_have_newer_tokens_but_no_older_ones(
    case: Case, monkeypatch: pytest.MonkeyPatch, first: str, second: str
) -> None:
    def answer(server: ScriptedServer, body: Any) -> Any:
        spans = [{"version": first, "start": 0, "end": 1}, {"version": second, "start": 1, "end": 2}]
        choice = {"token_ids": [1, 2], "finish_reason": "stop", "weight_versions": spans}
        return {"choices": [choice | {"logprobs": {"content": [{"logprob": -1.0}] * 2}}]}

    monkeypatch.setitem(ANSWERS, GENERATE, answer)
    case.sync(2)
    if first == "run/2":
        assert [made.versions for made in case.generate()] == [[2, 3]] * 4
    else:
        with pytest.raises(RolloutError, match=f"answered with weights {first}, not run/2"):
            case.generate()


def test_a_request_during_a_sync_that_fails_gets_an_error(case: Case) -> None:
    case.sync(0)
    case.server.refuses[LOAD] = "no such weight"
    update, request = case.generate_during_sync(1)
    with pytest.raises(RolloutError, match="have no weights"):
        request.result(timeout=60)
    with pytest.raises(RolloutError, match="no such weight"):
        update.result(timeout=60)


def test_closing_ends_requests_in_flight(case: Case) -> None:
    case.sync(0)
    case.server.delays[GENERATE] = 600.0
    request = case.threads.submit(case.generate)
    wait_until(lambda: bool(case.server.generated))
    case.engine.close()
    with pytest.raises(RolloutError, match="the engine is closed"):
        request.result(timeout=60)


def test_nobody_waits_for_a_closed_engine(case: Case) -> None:
    case.sync(0)
    case.engine._is_open.clear()  # a sync that does not end
    request = case.generate_later()
    assert not request.done()
    case.engine.close()
    with pytest.raises(RolloutError, match="the engine is closed"):
        request.result(timeout=60)
    with pytest.raises(RolloutError, match="the engine is closed"):
        case.generate()


@pytest.mark.parametrize(
    ("workers", "merged"),
    [
        ([{"a": 1, "b": 2, "c": 3}] * 2, {"a": 1, "b": 2, "c": 3}),
        ([{"a": 1, "b": 2}, {"a": 1, "b": 5}, {"a": 1, "b": 2}], {"a": 1, "b": -1}),
    ],
)
def test_the_checksums_of_all_workers_are_merged(
    case: Case, monkeypatch: pytest.MonkeyPatch, workers: Any, merged: dict[str, int]
) -> None:
    results = [[None, checksums] for checksums in workers]
    monkeypatch.setitem(ANSWERS, "/collective_rpc", lambda server, body: {"results": results})
    case.sync(0)
    assert case.engine.checksums() == {case.server.client.url: merged}
