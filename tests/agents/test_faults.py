"""Wrong, huge and broken requests get one error, and the endpoint goes on serving."""

import json
import logging
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
from tests.agents.scripted import KEY, ScriptedEpisodes
from tests.testing import wait_until

HELLO = [{"role": "user", "content": "hello"}]
CHAT = {"messages": HELLO}
CHATS = "/chat/completions"


def says(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


@pytest.fixture
def raw(endpoint: Endpoint) -> Iterator[httpx.Client]:
    """A client of an endpoint that still serves after the test."""
    with httpx.Client(base_url=endpoint.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=20) as client:
        yield client
        assert client.post("/chat/completions", json=CHAT).json()["choices"][0]["message"]["content"] == "hello"


def connect(endpoint: Endpoint) -> socket.socket:
    parts = urlsplit(endpoint.url)
    return socket.create_connection((str(parts.hostname), int(parts.port or 0)), timeout=20)


def request_head(path: str, *headers: str) -> bytes:
    return "\r\n".join(
        [f"POST /v1{path} HTTP/1.1", "Host: x", f"Authorization: Bearer {KEY}", *headers, "", ""]
    ).encode()


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


def test_unknown_paths_and_methods_are_refused(raw: httpx.Client) -> None:
    assert raw.post("/embeddings", json={}).status_code == 404
    assert raw.get("/chat/completions").status_code == 405


def test_a_body_that_is_no_json_object_is_refused(raw: httpx.Client) -> None:
    for body in (b"", b"{", b"[]", b"3", b"null", b"\xff", b'{"model": "\\ud800"}', b"[" * 50_000, b'{"n": 1' * 9_000):
        error_of(raw.post(CHATS, content=body), 400)
    for body in (b"", b"{", b"[1]", b'"a"', b"true", b"NaN", b"{}"):
        error_of(raw.post("/reward", content=body), 400)


UNSUPPORTED: list[tuple[str, Any, str]] = [
    ("unknown", 1, "unknown"),
    ("unknown", None, "unknown"),
    ("model", 3, "model"),
]
UNSUPPORTED += [("stream", "yes", "stream"), ("temperature", "hot", "temperature")]
UNSUPPORTED += [("temperature", -1, "temperature"), ("top_p", True, "top_p"), ("top_p", 1.5, "top_p")]
UNSUPPORTED += [("logit_bias", {"5": 1}, "logit_bias"), ("presence_penalty", 0.1, "presence_penalty")]
UNSUPPORTED += [("frequency_penalty", -0.1, "frequency_penalty"), ("n", 0, "n"), ("n", 10**9, "n")]
UNSUPPORTED += [("max_tokens", 0, "max_tokens"), ("max_tokens", 1.5, "max_tokens"), ("stop", [1], "stop[0]")]
UNSUPPORTED += [("stream_options", {"include_usage": 1}, "stream_options.include_usage")]
UNSUPPORTED += [
    ("response_format", {"type": "json_object"}, "response_format"),
    ("top_logprobs", 2, "top_logprobs"),
    ("audio", {"voice": "alloy"}, "audio"),
    ("modalities", ["text", "audio"], "modalities"),
    ("tool_choice", "required", "tool_choice"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}, "tool_choice"),
    ("functions", [{"name": "f"}], "functions"),
    ("tools", [{"type": "custom", "custom": {"name": "f"}}], "tools[0].type"),
    ("tools", [{"type": "function", "function": {}}], "tools[0].function.name"),
    ("messages", [], "messages"),
    ("messages", "hello", "messages"),
    ("messages", [3], "messages[0]"),
    ("messages", [{"role": "robot", "content": "x"}], "messages[0].role"),
    ("messages", [{"role": "user", "content": 3}], "messages[0].content"),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content"),
    ("messages", [{"role": "assistant", "audio": {"id": "a"}}], "messages[0].audio"),
]


def test_fields_that_are_wrong_or_not_supported_are_named(raw: httpx.Client, episodes: ScriptedEpisodes) -> None:
    for field, value, param in UNSUPPORTED:
        error = error_of(raw.post(CHATS, json={**CHAT, field: value}), 400)
        assert error["param"] == param, (field, value, error)
        assert param in error["message"]
        assert error["type"] == "invalid_request_error"
    assert not episodes.calls


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_call(
    raw: httpx.Client, endpoint: Endpoint, episodes: ScriptedEpisodes, stream: bool
) -> None:
    waiting = json.dumps({**says("wait"), "stream": stream})
    with connect(endpoint) as client:
        client.sendall(request_head(CHATS, f"Content-Length: {len(waiting)}") + waiting.encode())
        wait_until(lambda: episodes.num_waiting == 1)
    assert episodes.cancelled.wait(20)


def test_an_unexpected_error_is_logged_and_described(raw: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    assert error_of(raw.post(CHATS, json=says("fail")), 500)["type"] == "server_error"
    assert [record.exc_info is not None for record in caplog.records if record.levelno >= logging.ERROR] == [True]


def test_close_ends_open_connections_at_once(
    endpoint: Endpoint, episodes: ScriptedEpisodes, caplog: pytest.LogCaptureFixture
) -> None:
    idle, half_head, half_body, *waiting = [connect(endpoint) for _ in range(5)]
    half_head.sendall(b"POST /v1/chat")
    half_body.sendall(request_head(CHATS, "Content-Length: 100") + b"{")
    for client, stream in zip(waiting, (True, False), strict=True):
        body = json.dumps({**says("wait"), "stream": stream})
        client.sendall(request_head(CHATS, f"Content-Length: {len(body)}") + body.encode())
    wait_until(lambda: episodes.num_waiting == 2)
    time.sleep(0.1)  # until the half of the body has arrived
    start = time.monotonic()
    endpoint.close()
    endpoint.close()
    assert time.monotonic() - start < 2
    assert episodes.num_waiting == 0
    received = [b"".join(iter(lambda client=client: client.recv(10_000), b"")) for client in (*waiting, half_body)]
    for response in received:
        assert response.startswith(b"HTTP/1.1 503")
    assert [client.recv(1) for client in (idle, half_head)] == [b"", b""]
    for client in (idle, half_head, half_body, *waiting):
        client.close()
    with pytest.raises(ConnectionRefusedError):
        connect(endpoint)
    assert not caplog.records


def test_missing_packages_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, "fsdptrain.agents.endpoint")
    with pytest.raises(ConfigError, match=r"pip install 'fsdptrain\[agents\]'"):
        import_module("fsdptrain.agents.endpoint")
