"""HTTP client of one vLLM server. Every request has a deadline and is sent once; a failed one is a RolloutError that
names the server and the request."""

import asyncio
import ssl
from pathlib import Path
from typing import Any

import httpx

from fsdptrain.errors import RolloutError

_CONNECT_S = 30.0
_MAX_SHOWN = 400  # characters of an answer in an error
_LOG_LINES = 5  # of a failed server, in an error
_LINE_LENGTH = 300


class VLLMClient:
    """Sends requests to the server at `url`, with `api_key` if it requires one. Errors show the end of its `log`."""

    def __init__(self, url: str, api_key: str | None = None, *, log: Path | None = None) -> None:
        self.url = url.rstrip("/")
        self.log = log
        self._http = httpx.AsyncClient(
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            timeout=httpx.Timeout(None, connect=_CONNECT_S),  # `_request` has a deadline for the rest
            limits=httpx.Limits(max_keepalive_connections=0),  # an idle connection may be dead without a sign
            verify=ssl.create_default_context() if self.url.startswith("https:") else False,
            trust_env=False,  # no proxy between trainer and servers
        )

    async def version(self, *, timeout: float) -> str:
        """The tag of the engine's weights. The engine's scheduler answers, so this also checks the engine's health."""
        return await self.get("/weight_info", "weight_version", timeout=timeout)

    async def require_updated(self, tag: str, *, timeout: float) -> dict[str, int]:
        """After an update: RolloutError if a worker could not load the weights.

        Return the checksums of a verified update, -1 where workers disagree.
        """
        outcomes = await self.call_workers("fsdptrain_outcome", timeout=timeout)
        if errors := {error for error, _ in outcomes if error}:
            raise RolloutError(f"{self.url} could not load the weights: {'; '.join(sorted(errors))}")
        version = await self.version(timeout=timeout)
        if version != tag:
            raise RolloutError(f"{self.url} holds version {version!r} after the update to {tag!r}")
        first, *others = [checksums for _, checksums in outcomes]
        return {name: found if all(o.get(name) == found for o in others) else -1 for name, found in first.items()}

    async def call_workers(self, method: str, *args: Any, timeout: float) -> list[Any]:
        """Call `method` of the worker extension; one result per worker."""
        return await self.post("/collective_rpc", {"method": method, "args": args}, "results", timeout=timeout)

    async def get(self, path: str, field: str = "", *, timeout: float) -> Any:
        return await self._request("GET", path, None, field, timeout)

    async def post(self, path: str, body: Any = None, field: str = "", *, timeout: float, hint: str = "") -> Any:
        return await self._request("POST", path, body, field, timeout, hint)

    async def _request(self, method: str, path: str, body: Any, field: str, timeout: float, hint: str = "") -> Any:
        """Return the JSON of the answer, or its `field`; the text of an answer that is no JSON.

        timeout: for the whole request [s]
        hint: ends the error of a request that takes longer
        """
        what = f"{method} {path}"
        try:
            async with asyncio.timeout(timeout):
                response = await self._http.request(method, self.url + path, json=body)
        except TimeoutError:
            raise RolloutError(f"{self.url} did not answer {what} in {timeout:.0f} s{hint}") from None
        except httpx.HTTPError as error:
            said = "" if self.log is None else f" ({self.log}: {last_words(self.log)})"
            why = f"{type(error).__name__}: {error}{said}"
            raise RolloutError(f"{self.url} ended the connection during {what}: {why}") from None
        if response.status_code != 200:
            words = shown(response.text)
            raise RolloutError(f"{self.url} answered {what} with status {response.status_code}: {words}")
        try:
            answer = response.json()
            return answer[field] if field else answer
        except (ValueError, LookupError, TypeError):
            if not field:  # some routes answer nothing, or a word
                return response.text
            raise RolloutError(f"{self.url} answered {what} without {field!r}: {shown(response.text)}") from None


def last_words(log: Path) -> str:
    """The last errors of a log, or else its last lines, on one line."""
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    lines = [line.strip()[:_LINE_LENGTH] for line in lines]
    errors = [line for line in lines if "Error" in line or "error:" in line]
    return " | ".join((errors or lines)[-_LOG_LINES:])


def shown(answer: Any) -> str:
    return " ".join(str(answer).split())[:_MAX_SHOWN]
