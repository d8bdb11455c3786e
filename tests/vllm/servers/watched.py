"""Tests that disturb a request wait for it, not for the clock."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from fsdptrain.rollout.vllm_http import VLLMClient

GENERATE = "/inference/v1/generate"


class Watched:
    """Lets a test know when the server at `url` is about to be asked for a path, and when it has answered."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, url: str, path: str, *, before: Callable[[], None] = lambda: None
    ) -> None:
        self.asked, self.answered = threading.Event(), threading.Event()
        self.num_asked = self.num_answered = 0
        lock = threading.Lock()
        original = VLLMClient._request

        def request(client: VLLMClient, method: str, asked: str, *rest: Any) -> Any:
            if (client.url, asked) != (url, path):
                return original(client, method, asked, *rest)
            before()
            with lock:
                self.num_asked += 1
            self.asked.set()
            answer = original(client, method, asked, *rest)
            with lock:
                self.num_answered += 1
            self.answered.set()
            return answer

        monkeypatch.setattr(VLLMClient, "_request", request)
