"""A judge gives a score or a reason. It is asked once per message, and again only if the server may recover."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from fsdptrain.agents.endpoint import Endpoint
from fsdptrain.config import Config, RewardConfig
from fsdptrain.errors import ConfigError
from fsdptrain.rewards import judge as judges
from fsdptrain.rewards.build import build_reward, reads_environment
from fsdptrain.rewards.judge import RETRIES, Judge
from fsdptrain.rewards.results import RewardResults, compute_rewards
from fsdptrain.types import Prompt
from tests.agents.scripted import KEY, ScriptedEpisodes
from tests.rewards import in_process

Reply = tuple[int, dict[str, str], str]  # status, headers, body


@contextmanager
def serving(reply: Callable[[int], Reply]) -> Iterator["Server"]:
    """A server that answers request i with `reply(i)`."""
    server = Server(reply)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Server(ThreadingHTTPServer):
    def __init__(self, reply: Callable[[int], Reply]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply, self.lock = reply, threading.Lock()
        self.times: list[float] = []
        self.bodies: list[dict[str, Any]] = []
        self.clients = set[Any]()
        self.num_open = self.most_open = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        with self.server.lock:
            self.server.num_open += 1
            self.server.most_open = max(self.server.most_open, self.server.num_open)
            index = len(self.server.times)
            self.server.times.append(time.monotonic())
            self.server.clients.add(self.client_address)
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.bodies.append(json.loads(body))
        status, headers, text = self.server.reply(index)
        with self.server.lock:
            self.server.num_open -= 1
        self.send_response(status)
        for name, value in {**headers, "content-length": str(len(text))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


def answer(text: str | None) -> Reply:
    return 200, {}, json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]})


def a_judge(server: Server, **values: Any) -> Judge:
    return Judge(server.url, "m", backoff=0.001, **values)


def scores(judge: Judge, responses: Sequence[str], labels: Sequence[Any] = ()) -> RewardResults:
    prompts = [Prompt(str(i), [1], "", label=label) for i, label in enumerate(labels or [None] * len(responses))]
    reward = in_process(judge)
    try:
        return compute_rewards(reward, prompts, responses)
    finally:
        reward.close()


def rewards_of(results: RewardResults) -> list[float | None]:
    return [result.reward for result in results.results]


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Endpoint, ScriptedEpisodes]]:
    monkeypatch.setenv("JUDGE_API_KEY", KEY)
    episodes = ScriptedEpisodes()
    endpoint = Endpoint(episodes)
    yield endpoint, episodes
    endpoint.close()


def test_the_endpoint_of_the_project_judges(endpoint: tuple[Endpoint, ScriptedEpisodes]) -> None:
    """It echoes the rubric."""
    judge = Judge(endpoint[0].url, "org/tiny", "{response} <score>{label}</score>", max_score=5.0)
    results = scores(judge, ["{label}", "b", "c", "d"], [4, 2.5, 6, -1])
    assert rewards_of(results) == [0.8, 0.5, None, None]
    assert results.first_error == "--reward judge: the score 6 is not from 0 to 5"
    calls = endpoint[1].calls
    assert {call.messages[0]["content"] for call in calls if call.messages} >= {"{label} <score>4</score>"}
    assert [call.sampling["temperature"] for call in calls] == [0.0] * 4


def test_a_wrong_key_is_a_reason_without_retries(
    endpoint: tuple[Endpoint, ScriptedEpisodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "wrong")
    results = scores(Judge(endpoint[0].url, "org/tiny", backoff=60.0), ["a"])
    assert results.num_unscored == 1
    assert "status 401" in str(results.first_error)
    assert not endpoint[1].calls


def test_a_busy_server_is_asked_again_when_it_says() -> None:
    def reply(index: int) -> Reply:
        return [(429, {"retry-after": "1"}, ""), (503, {}, ""), answer("<score>10</score>")][index]

    with serving(reply) as server:
        assert rewards_of(scores(a_judge(server), ["a"])) == [1.0]
        first, second, _ = server.times
        assert second - first >= 1.0


def test_a_server_that_always_fails_leaves_samples_unscored() -> None:
    with serving(lambda _: (500, {}, "out of memory")) as server:
        results = scores(a_judge(server), ["a"])
        assert rewards_of(results) == [None]
        assert "/v1/chat/completions: status 500: 'out of memory'" in str(results.first_error)
        assert len(server.times) == RETRIES + 1
    results = scores(a_judge(server), ["a"])  # nobody listens
    assert "ConnectError" in str(results.first_error)


@pytest.mark.parametrize(
    "garbage",
    [(200, {}, "hello"), (200, {}, "[]"), (200, {}, '{"choices": []}'), answer(None), answer("7"), answer("<score>x")],
)
def test_an_answer_without_a_score_is_a_reason_and_is_not_kept(garbage: Reply) -> None:
    with serving(lambda index: answer("<score>1</score>") if index else garbage) as server:
        judge = a_judge(server)
        results = scores(judge, ["a"])
        assert "no score in the answer" in str(results.first_error)
        assert len(server.times) == 1
        assert rewards_of(scores(judge, ["a"])) == [0.1]


def test_requests_are_limited_and_share_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judges, "MAX_CONNECTIONS", 3)

    def reply(_: int) -> Reply:
        time.sleep(0.01)
        return answer("<score>5</score>")

    with serving(reply) as server:
        assert rewards_of(scores(a_judge(server), [str(i) for i in range(40)])) == [0.5] * 40
        assert server.most_open <= 3
        assert len(server.clients) < 40


def test_the_options_make_the_judge(tmp_path: Path) -> None:
    rubric = tmp_path / "rubric.txt"
    rubric.write_text("rate {response}")
    options: dict[str, Any] = {"judge_url": "http://h/v1", "judge_model": "m"}
    config = Config(hf_checkpoint="x", reward=["judge=2"], judge_rubric=str(rubric), **options)
    weighted = build_reward(config.reward, prompt_data=["x"])
    judge = weighted.components[0].function
    assert isinstance(judge, Judge)
    assert (judge.url, judge.model, judge.rubric, judge.max_score) == ("http://h/v1", "m", "rate {response}", 10.0)
    assert weighted.weights == {"judge": 2.0}
    assert not reads_environment(weighted)
    with pytest.raises(ConfigError, match=r"--judge-rubric 'missing[.]txt' must be a text, or a file"):
        build_reward(RewardConfig(reward=["judge"], judge_rubric="missing.txt"), prompt_data=["x"])


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"reward": ["judge"]}, "--reward judge needs --judge-url and --judge-model: set both"),
        ({"judge_model": "m"}, "--judge-model has no effect without --reward judge: add it, or remove this"),
        (
            {"reward": ["judge"], "judge_model": "m", "judge_url": "host:80"},
            "--judge-url 'host:80' is no address: write e.g. http://127.0.0.1:8000/v1",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(hf_checkpoint="x", **options)
    assert str(caught.value) == line
