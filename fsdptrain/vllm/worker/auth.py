"""Runs inside vLLM's API server: every route requires the API key.

vLLM requires it on its public routes only; the routes of weight transfer would be open to every user of the machine.
Needs only the standard library.
"""

import os
import secrets
from collections.abc import Awaitable, Callable
from typing import Any


class ApiKeyMiddleware:
    """ASGI middleware: answers 401 to a request without `VLLM_API_KEY`, except to /health."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")  # a lifespan has no headers
        has_key = secrets.compare_digest(given, self._expected)
        if scope["type"] == "lifespan" or scope["path"] == "/health" or has_key:
            await self._app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b"the API key is missing"})
