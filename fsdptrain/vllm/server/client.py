"""HTTP client of one vLLM server. Every request has a deadline and is sent once; a failed one is a RolloutError that
names the server and the request."""

import asyncio
import json
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx

from fsdptrain.errors import RolloutError

_CONNECT_S = 30.0
_MAX_SHOWN = 400  # characters of an answer in an error
_LOG_LINES = 5  # of a failed server, in an error
_LINE_LENGTH = 300


class Deadline:
    """One deadline for several waits."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """[s] at least 0.01, so that a request after the deadline fails as one that got no answer."""
        return max(0.01, self._end - time.monotonic())

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._end


@dataclass(frozen=True)
class Generation:
    """One completion as the server returned it."""

    token_ids: list[int]  # (R,)
    logprobs: list[float]  # (R,)
    finish_reason: Literal["stop", "length"]
    versions: list[str]  # (R,) the tag of the weights that sampled each token
    routed_experts: str | None  # numpy array as base64


class VLLMClient:
    """Sends requests to the server at `url`, with `api_key` if it requires one. Errors show the end of its `log`."""

    def __init__(self, url: str, api_key: str | None = None, *, log: Path | None = None) -> None:
        self.url = url.rstrip("/")
        self.host = host_of(self.url)
        self.log = log
        self._http = httpx.AsyncClient(
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            timeout=httpx.Timeout(None, connect=_CONNECT_S),  # `_request` has a deadline for the rest
            limits=httpx.Limits(max_keepalive_connections=0),  # an idle connection may be dead without a sign
            verify=ssl.create_default_context() if self.url.startswith("https:") else False,
            trust_env=False,  # no proxy between trainer and servers
        )

    async def get(self, path: str, *, timeout: float) -> Any:
        return await self._request("GET", path, None, timeout)

    async def post(self, path: str, body: Any = None, *, timeout: float) -> Any:
        return await self._request("POST", path, body, timeout)

    async def generate(self, body: Mapping[str, Any], *, timeout: float) -> Generation:
        path, hint = "/inference/v1/generate", "; raise --rollout-timeout, or generate fewer tokens per call"
        answer = await self._request("POST", path, body, timeout, hint)
        try:
            generation = _generation(answer)
        except (LookupError, AttributeError, TypeError, ValueError) as error:
            raise RolloutError(f"{self.url} answered POST {path} without {error!r}: {_shown(answer)}") from None
        if generation.finish_reason not in ("stop", "length"):
            raise RolloutError(f"{self.url} ended a completion with {generation.finish_reason!r}")
        return generation

    async def version(self, *, timeout: float) -> str:
        """The tag of the engine's weights. The engine's scheduler answers, so this also checks the engine's health."""
        return await self._field("GET", "/weight_info", "weight_version", timeout=timeout)

    async def world_size(self, *, timeout: float) -> int:
        """The number of the engine's workers."""
        return await self._field("GET", "/get_world_size", "world_size", timeout=timeout)

    async def require_updated(self, tag: str, deadline: Deadline) -> None:
        """After an update: RolloutError if a worker could not load the weights. Resets the prefix cache."""
        errors = {error for error in await self.call_workers("fsdptrain_error", timeout=deadline.left) if error}
        if errors:
            raise RolloutError(f"{self.url} could not load the weights: {'; '.join(sorted(errors))}")
        if not await self._field("POST", "/reset_prefix_cache", "success", timeout=deadline.left):
            raise RolloutError(f"{self.url} did not reset its prefix cache, which belongs to the old weights")
        version = await self.version(timeout=deadline.left)
        if version != tag:
            raise RolloutError(f"{self.url} holds version {version!r} after the update to {tag!r}")

    async def expect_checksums(self, *, timeout: float) -> None:
        """The next update is verified."""
        await self.call_workers("fsdptrain_expect_checksums", timeout=timeout)

    async def checksums(self, *, timeout: float) -> dict[str, int]:
        """Of the tensors that all workers loaded in the last update; -1 where they disagree."""
        workers = await self.call_workers("fsdptrain_checksums", timeout=timeout)
        first, *others = workers
        return {name: found if all(o.get(name) == found for o in others) else -1 for name, found in first.items()}

    async def engine_config(self, *, timeout: float) -> dict[str, Any]:
        return await self._field("GET", "/server_info?config_format=json", "vllm_config", timeout=timeout)

    async def call_workers(self, method: str, *args: Any, timeout: float) -> list[Any]:
        """Call `method` of the worker extension; one result per worker."""
        body = {"method": method, "args": args}
        return await self._field("POST", "/collective_rpc", "results", body=body, timeout=timeout)

    async def _field(self, method: str, path: str, name: str, *, body: Any = None, timeout: float) -> Any:
        answer = await self._request(method, path, body, timeout)
        if not isinstance(answer, dict) or name not in answer:
            raise RolloutError(f"{self.url} answered {method} {path} without {name!r}: {_shown(answer)}")
        return answer[name]

    async def _request(self, method: str, path: str, body: Any, timeout: float, hint: str = "") -> Any:
        """
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
        text = response.content.decode(errors="replace")
        if response.status_code != 200:
            raise RolloutError(f"{self.url} answered {what} with status {response.status_code}: {_shown(text)}")
        if text.lstrip()[:1] not in ("{", "["):  # some routes answer nothing, or a word
            return None
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise RolloutError(f"{self.url} answered {what} with broken JSON: {_shown(text)}") from None


def last_words(log: Path) -> str:
    """The last errors of a log, or else its last lines, on one line."""
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    lines = [line.strip()[:_LINE_LENGTH] for line in lines]
    errors = [line for line in lines if "Error" in line or "error:" in line]
    return " | ".join((errors or lines)[-_LOG_LINES:])


def host_of(url: str) -> str:
    host = urlsplit(url).hostname
    assert host is not None, "config checks --rollout-urls"
    return host


def _generation(answer: Any) -> Generation:
    choice = answer["choices"][0]
    token_ids = choice["token_ids"]
    logprobs = [float(found["logprob"]) for found in choice["logprobs"]["content"]]
    spans = choice["weight_versions"] or []
    if not all(0 <= span["start"] <= span["end"] <= len(token_ids) for span in spans):
        raise ValueError(f"weight_versions within {len(token_ids)} tokens")
    versions = [str(span["version"]) for span in spans for _ in range(span["start"], span["end"])]
    if not all(type(token) is int and token >= 0 for token in token_ids):
        raise ValueError("token_ids that are whole numbers")
    if not token_ids or len(logprobs) != len(token_ids) or len(versions) != len(token_ids):
        raise ValueError(f"a logprob and a version of each of {len(token_ids)} tokens")
    return Generation(token_ids, logprobs, choice["finish_reason"], versions, choice.get("routed_experts"))


def _shown(answer: Any) -> str:
    return " ".join(str(answer).split())[:_MAX_SHOWN]
