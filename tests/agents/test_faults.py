"""Wrong, huge and broken requests get one error, and the endpoint goes on serving."""

import json
import socket
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from fsdptrain.agents.endpoint import Endpoint
from fsdptrain.errors import ConfigError
from tests.agents.agents import says
from tests.agents.scripted import KEY, ScriptedEpisodes
from tests.testing import wait_until

CHAT = {"messages": says("hello")}
CHATS = "/chat/completions"


@pytest.fixture
def raw(endpoint: Endpoint) -> Iterator[httpx.Client]:
    """A client of an endpoint that still serves after the test."""
    with httpx.Client(base_url=endpoint.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=20) as client:
        yield client
        assert client.post(CHATS, json=CHAT).json()["choices"][0]["message"]["content"] == "hello"


def connect(endpoint: Endpoint) -> socket.socket:
    parts = urlsplit(endpoint.url)
    return socket.create_connection((str(parts.hostname), int(parts.port or 0)), timeout=20)


def chat_request(body: str, length: int | None = None) -> bytes:
    """`length`: what its head says, if not that of `body`."""
    head = [f"POST /v1{CHATS} HTTP/1.1", "Host: x", f"Authorization: Bearer {KEY}"]
    return "\r\n".join([*head, f"Content-Length: {length or len(body)}", "", body]).encode()


def waiting(stream: bool) -> bytes:
    return chat_request(json.dumps({"messages": says("wait"), "stream": stream}))


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    return error


def test_only_the_key_of_an_open_episode_is_served(raw: httpx.Client, episodes: ScriptedEpisodes) -> None:
    for headers in ({"Authorization": "Bearer other"}, {"Authorization": f"Basic {KEY}"}, {"Authorization": ""}):
        assert error_of(raw.post(CHATS, json=CHAT, headers=headers), 401)["code"] == "invalid_api_key"
        error_of(raw.post("/reward", json=1, headers=headers), 401)
        error_of(raw.get("/models", headers=headers), 401)
    assert not episodes.calls
    assert not episodes.rewards


def test_unknown_paths_and_methods_and_bodies_that_are_no_json_objects_are_refused(raw: httpx.Client) -> None:
    assert raw.post("/embeddings", json={}).status_code == 404
    assert raw.get(CHATS).status_code == 405
    for body in (b"", b"{", b"[]", b"3", b"null", b"\xff", b'{"model": "\\ud800"}', b"[" * 50_000, b'{"n": 1' * 9_000):
        error_of(raw.post(CHATS, content=body), 400)
    for body in (b"", b"{", b"[1]", b'"a"', b"true", b"NaN", b"{}"):
        error_of(raw.post("/reward", content=body), 400)


UNSUPPORTED: dict[str, list[Any]] = {
    "unknown": [1, None], "model": [3], "stream": ["yes"], "temperature": ["hot", -1], "top_p": [True, 1.5],
    "logit_bias": [{"5": 1}], "presence_penalty": [0.1], "frequency_penalty": [-0.1], "n": [0, 10**9],
    "max_tokens": [0, 1.5], "top_logprobs": [2], "response_format": [{"type": "json_object"}],
    "audio": [{"voice": "alloy"}], "modalities": [["text", "audio"]], "functions": [[{"name": "f"}]],
    "tool_choice": ["required", {"type": "function", "function": {"name": "f"}}], "messages": [[], "hello"],
}  # fmt: skip
UNSUPPORTED_PARTS: list[tuple[str, Any, str]] = [
    ("stop", [1], "stop[0]"),
    ("stream_options", {"include_usage": 1}, "stream_options.include_usage"),
    ("tools", [{"type": "custom", "custom": {"name": "f"}}], "tools[0].type"),
    ("tools", [{"type": "function", "function": {}}], "tools[0].function.name"),
    ("messages", [3], "messages[0]"),
    ("messages", [{"role": "robot", "content": "x"}], "messages[0].role"),
    ("messages", [{"role": "user", "content": 3}], "messages[0].content"),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content"),
    ("messages", [{"role": "assistant", "audio": {"id": "a"}}], "messages[0].audio"),
]


def test_fields_that_are_wrong_or_not_supported_are_named(raw: httpx.Client, episodes: ScriptedEpisodes) -> None:
    wholes = [(field, value, field) for field, values in UNSUPPORTED.items() for value in values]
    for field, value, param in [*wholes, *UNSUPPORTED_PARTS]:
        error = error_of(raw.post(CHATS, json={**CHAT, field: value}), 400)
        assert error["param"] == param, (field, value, error)
        assert param in error["message"]
        assert error["type"] == "invalid_request_error"
    assert not episodes.calls


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_call(
    raw: httpx.Client, endpoint: Endpoint, episodes: ScriptedEpisodes, stream: bool
) -> None:
    with connect(endpoint) as client:
        client.sendall(waiting(stream))
        wait_until(lambda: episodes.num_waiting == 1)
    assert episodes.cancelled.wait(20)


def test_close_ends_open_connections_at_once(
    endpoint: Endpoint, episodes: ScriptedEpisodes, caplog: pytest.LogCaptureFixture
) -> None:
    idle, half_head, half_body, *others = clients = [connect(endpoint) for _ in range(5)]
    half_head.sendall(b"POST /v1/chat")
    half_body.sendall(chat_request("{", length=100))
    for client, stream in zip(others, (True, False), strict=True):
        client.sendall(waiting(stream))
    wait_until(lambda: episodes.num_waiting == 2)
    time.sleep(0.1)  # until the half of the body has arrived
    start = time.monotonic()
    endpoint.close()
    endpoint.close()
    assert time.monotonic() - start < 2
    assert episodes.num_waiting == 0
    for client in (*others, half_body):
        assert b"".join(iter(lambda client=client: client.recv(10_000), b"")).startswith(b"HTTP/1.1 503")
    assert [client.recv(1) for client in (idle, half_head)] == [b"", b""]
    for client in clients:
        client.close()
    with pytest.raises(ConnectionRefusedError):
        connect(endpoint)
    assert not caplog.records


def test_missing_packages_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, "fsdptrain.agents.endpoint")
    with pytest.raises(ConfigError, match=r"pip install '\.\[agents\]'"):
        import_module("fsdptrain.agents.endpoint")
