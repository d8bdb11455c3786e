"""Runs inside vLLM's API server: every route wants the API key.

vLLM asks for it on its public routes only; those that take weights and commands would be open to every user of the
machine. Needs nothing but the standard library.
"""

import os
import secrets
from collections.abc import Awaitable, Callable
from typing import Any


class ApiKeyMiddleware:
    """ASGI middleware: no answer but 401 without `VLLM_API_KEY`; /health is open."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or scope["path"] == "/health" or self._is_known(scope):
            await self._app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b"the API key is missing"})

    def _is_known(self, scope: Any) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return secrets.compare_digest(given, self._expected)
