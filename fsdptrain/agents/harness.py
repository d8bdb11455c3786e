"""Run one episode of an agent: an async function of the user, or a program."""

import asyncio
import json
import os
import shlex
import signal
import ssl
import subprocess
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

from fsdptrain.errors import ConfigError, describe
from fsdptrain.types import Prompt

_OF_RANKS = ("RANK", "LOCAL_RANK", "GROUP_", "ROLE_", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_", "TORCHELASTIC_")
MODEL = "policy"  # model name in requests; the endpoint accepts any name


class AgentError(Exception):
    """An agent failed. Its episode gets no score."""


class Harness(Protocol):
    """Run an episode that calls the model at `url` with `key`. Returns its reward or None. Called from threads."""

    def __call__(self, prompt: Prompt, *, url: str, key: str, timeout: float) -> Any: ...

    def close(self) -> None:
        """End running episodes."""
        ...


@dataclass(frozen=True)
class AsyncFunction:
    """`async def run_episode(client, prompt) -> float | dict | None`, with an openai.AsyncOpenAI client.

    Each episode runs in a separate event loop, so an episode that blocks does not delay the others.
    """

    function: Callable[[Any, Prompt], Awaitable[Any]]

    def __post_init__(self) -> None:
        try:
            import openai  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                "--environment names an async function, whose client is openai.AsyncOpenAI: in the clone, "
                f"pip install '.[agents]' ({error})"
            ) from error

    def __call__(self, prompt: Prompt, *, url: str, key: str, timeout: float) -> Any:
        return asyncio.run(self._run(prompt, url, key, timeout))

    def close(self) -> None:
        """Do nothing: an episode ends with its thread."""

    async def _run(self, prompt: Prompt, url: str, key: str, timeout: float) -> Any:
        import openai

        http = openai.DefaultAsyncHttpxClient(verify=_ssl_context(), timeout=timeout, trust_env=False)
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, http_client=http) as client:
            return await asyncio.wait_for(self._call(client, prompt), timeout)

    async def _call(self, client: Any, prompt: Prompt) -> Any:
        try:
            return await self.function(client, prompt)
        except (SystemExit, TimeoutError) as error:  # asyncio reports the first twice; the second is not our deadline
            raise AgentError(describe(error)) from error


@cache
def _ssl_context() -> ssl.SSLContext:
    """Share one context: creating it takes longer than an episode of a small model."""
    return ssl.create_default_context()


@dataclass(frozen=True)
class Command:
    """A program with OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL in its environment.

    It reads the prompt as JSON from its standard input, and prints its reward, a number or a JSON object, as the last
    line, or posts it to OPENAI_BASE_URL/reward.
    """

    command: str
    _running: set[int] = field(default_factory=set)  # process groups

    def __post_init__(self) -> None:
        try:
            arguments = shlex.split(self.command)
        except ValueError as error:
            raise ConfigError(f"--environment-command {self.command!r}: {error}") from error
        if not arguments:
            raise ConfigError("--environment-command is empty")

    def __call__(self, prompt: Prompt, *, url: str, key: str, timeout: float) -> Any:
        row = {"prompt": prompt.source, "label": prompt.label, "metadata": dict(prompt.metadata)}
        with subprocess.Popen(
            shlex.split(self.command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**program_environment(), "OPENAI_BASE_URL": url, "OPENAI_API_KEY": key, "OPENAI_MODEL": MODEL},
            start_new_session=True,  # a process group, so that its children can be killed
            text=True,
            errors="replace",
        ) as process:
            self._running.add(process.pid)
            try:
                out, err = process.communicate(json.dumps(row, default=str), timeout)
            except subprocess.TimeoutExpired as error:
                raise TimeoutError from error
            finally:
                _kill(process.pid)
                self._running.discard(process.pid)
        if process.returncode:
            last = (err.strip().splitlines() or ["no error output"])[-1]
            raise AgentError(f"it ended with exit code {process.returncode}: {last:.200}")
        return _printed_reward(out)

    def close(self) -> None:
        for group in tuple(self._running):
            _kill(group)


def program_environment() -> dict[str, str]:
    """Return the trainer's environment without the variables of its ranks and without a proxy for the endpoint."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_RANKS)}
    no_proxy = ",".join(filter(None, [os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), "127.0.0.1"]))
    return {**kept, "no_proxy": no_proxy, "NO_PROXY": no_proxy}


def _kill(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _printed_reward(out: str) -> Any:
    """Return the reward in the last line, or None."""
    lines = out.strip().splitlines()
    with suppress(ValueError, RecursionError):
        found = json.loads(lines[-1]) if lines else None
        return found if isinstance(found, int | float | dict) and not isinstance(found, bool) else None
    return None
