"""Wait for requests to a server, not for the clock."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from fsdptrain.vllm.server.client import VLLMClient

GENERATE = "/inference/v1/generate"


class Watched:
    """Lets a test know when the server at `url` is about to be asked for a path, and when it has answered."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, url: str, path: str, *, before: Callable[[], None] = lambda: None
    ) -> None:
        self.asked, self.answered = threading.Event(), threading.Event()
        self.asked_bodies: list[tuple[Any, int]] = []  # of requests, and how many were answered before
        self.answered_bodies: list[Any] = []  # of requests, in the order of their answers
        lock = threading.Lock()
        original = VLLMClient._request

        async def request(client: VLLMClient, method: str, asked: str, body: Any, *rest: Any) -> Any:
            if (client.url, asked) != (url, path):
                return await original(client, method, asked, body, *rest)
            before()
            with lock:
                self.asked_bodies.append((body, len(self.answered_bodies)))
            self.asked.set()
            answer = await original(client, method, asked, body, *rest)
            with lock:
                self.answered_bodies.append(body)
            self.answered.set()
            return answer

        monkeypatch.setattr(VLLMClient, "_request", request)
