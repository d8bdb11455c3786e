"""Environments of the `verifiers` library (0.2), without a server: `--environment verifiers:<id>`.

verifiers runs a rollout itself and asks a client for each answer of the model. Here the client waits for our engine:
the rollout runs in an event loop of its own thread, and `step` hands it the response and waits until it asks again, or
has scored. So whatever an environment overrides (set-up, tools, stop conditions, rubric) is run by verifiers' own code.

Newer versions (0.3) have no such environments: their agents are programs that talk to a server.
"""

import asyncio
import importlib
import json
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from fsdptrain.environments.tool_calls import TOOL_CALL, ToolCall, find_tool_calls
from fsdptrain.errors import ConfigError
from fsdptrain.types import Message, Prompt, Turn

INSTALL = "pip install 'fsdptrain[verifiers]'"
MODEL = "policy"  # what verifiers calls the model


def load(env_id: str, **kwargs: Any) -> "VerifiersEnvironment":
    """The environment that `verifiers.load_environment(env_id, **kwargs)` makes. ConfigError if it cannot be played."""
    try:
        verifiers = importlib.import_module("verifiers")
    except ImportError as error:
        raise ConfigError(f"--environment verifiers:{env_id} needs the library: {INSTALL}") from error
    if getattr(verifiers, "load_environment", None) is None:
        raise ConfigError(
            f"--environment verifiers:{env_id}: verifiers {verifiers.__version__} has no environments that take turns, "
            f"only 0.2 has: {INSTALL}"
        )
    with _own_signals():
        environment = verifiers.load_environment(env_id, **kwargs)
    if environment.requires_group_rollouts or not isinstance(environment, verifiers.MultiTurnEnv):
        raise ConfigError(
            f"--environment verifiers:{env_id} is a {type(environment).__name__} "
            "and must be a MultiTurnEnv whose rubric scores each rollout by itself"
        )
    return VerifiersEnvironment(environment)


class VerifiersEnvironment:
    """One environment of verifiers for all episodes; its rows come by `--prompt-data environment`."""

    system_prompt = ""  # the rows have it

    def __init__(self, environment: Any) -> None:
        self.environment = environment
        self.tools = [_schema(tool) for tool in environment.tool_defs or ()]
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True, name="verifiers").start()

    def dataset(self) -> Sequence[Mapping[str, Any]]:
        rows = self.environment.get_dataset()
        return [
            {"prompt": row["prompt"], "label": row.get("answer"), "metadata": {"verifiers": dict(row)}} for row in rows
        ]

    def reset(self, prompt: Prompt, seed: int) -> "Rollout":
        del seed  # verifiers knows none
        row = prompt.metadata.get("verifiers")
        if row is None:
            raise ConfigError("--environment verifiers:... plays rows of its own: use --prompt-data environment")
        rollout = Rollout(self._loop)
        rollout.start(self.environment, row)
        begin, end = rollout.wait()
        if end is not None or [_plain(m) for m in begin] != [_plain(m) for m in row["prompt"]]:
            raise ValueError("the environment does not begin with the prompt of its row")
        return rollout

    def step(self, state: "Rollout", response: str) -> Turn:
        state.answer(response)
        heard, end = state.wait()
        if end is not None:
            return Turn(done=True, reward=end)
        return Turn([_observation(message) for message in heard])

    def finish(self, state: "Rollout") -> Mapping[str, float] | None:
        """Of an episode that a limit of ours ended: verifiers is told that it is too long, and scores what there is."""
        return state.end()


@dataclass
class Rollout:
    """One rollout of verifiers, as seen from outside of its event loop."""

    loop: asyncio.AbstractEventLoop
    events: SimpleQueue[Any] = field(default_factory=SimpleQueue)  # messages that ask for an answer; at last, the end
    task: Any = None
    asking: "asyncio.Future[str] | None" = None  # waits for the model
    known: list[Any] = field(default_factory=list)  # messages that the model has seen or said
    ended: bool = False

    def start(self, environment: Any, row: Mapping[str, Any]) -> None:
        self.task = asyncio.run_coroutine_threadsafe(self._run(environment, row), self.loop)

    def wait(self) -> tuple[list[Any], Mapping[str, float] | None]:
        """What is new to the model, or the reward at the end. Raises what went wrong in there."""
        event = self.events.get()
        if isinstance(event, list):
            return self._new(event), None
        self.ended = True
        if isinstance(event, BaseException):
            raise event
        return [], event

    def answer(self, response: str | Exception) -> None:
        asking, self.asking = self.asking, None
        assert asking is not None, "verifiers has not asked"
        if isinstance(response, Exception):
            self.loop.call_soon_threadsafe(asking.set_exception, response)
        else:
            self.loop.call_soon_threadsafe(asking.set_result, response)

    def end(self) -> Mapping[str, float] | None:
        if self.ended:
            return None
        if self.asking is None:  # a step has failed, or still runs
            self.task.cancel()
            return None
        self.answer(importlib.import_module("verifiers.errors").OverlongPromptError("a limit of fsdptrain"))
        return self.wait()[1]

    async def ask(self, messages: list[Any]) -> str:
        """In the loop: hand `messages` out, and wait for the answer."""
        self.asking = self.loop.create_future()
        self.events.put(list(messages))
        return await self.asking

    def _new(self, messages: list[Any]) -> list[Any]:
        """Behind what the model knows, and its own answer."""
        known = len(self.known)
        told = [_plain(message) for message in messages[:known]]
        if told != self.known or (known and _role(messages[known]) != "assistant"):
            raise ValueError("the environment rewrites what was said before: such an episode is no single sequence")
        self.known = [_plain(message) for message in messages]
        return messages[known + 1 :] if known else messages

    async def _run(self, environment: Any, row: Mapping[str, Any]) -> None:
        try:
            output = await environment.run_rollout(dict(row), _client(self), MODEL, {})
            if output["error"] is not None:
                raise RuntimeError(str(output["error"]))
            self.events.put({**(output["metrics"] or {}), "reward": output["reward"]})
        except Exception as error:  # noqa: BLE001  # foreign code: told to whoever waits
            self.events.put(error)


def _client(rollout: Rollout) -> Any:
    """The model as verifiers sees it. A class made here, for its base is of a library that may not be installed."""
    base: Any = importlib.import_module("verifiers.clients").Client
    types: Any = importlib.import_module("verifiers.types")

    class EngineClient(base):
        async def get_response(self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any) -> Any:
            text = await rollout.ask(prompt)
            message = types.ResponseMessage(**_response_fields(text, types.ToolCall if tools else None))
            return types.Response(id="", created=0, model=model, message=message)

        def setup_client(self, config: Any) -> Any: ...

        async def to_native_tool(self, tool: Any) -> Any: ...

        async def to_native_prompt(self, messages: Any) -> Any: ...

        async def get_native_response(self, *args: Any, **kwargs: Any) -> Any: ...

        async def raise_from_native_response(self, response: Any) -> None: ...

        async def from_native_response(self, response: Any) -> Any: ...

        async def close(self) -> None: ...

    return EngineClient(None)


def _response_fields(text: str, call_type: Any) -> dict[str, Any]:
    """A response, with the tool calls in it taken out where there are tools (`call_type`); one that cannot be read
    stays in the text.
    """
    found = [call for call in find_tool_calls(text) if isinstance(call, ToolCall)] if call_type else []
    calls = [
        call_type(id=f"call_{i}", name=call.name, arguments=json.dumps(call.arguments)) for i, call in enumerate(found)
    ]
    return {
        "content": TOOL_CALL.sub("", text).strip() if calls else text,
        "tool_calls": calls or None,
        "finish_reason": "tool_calls" if calls else "stop",
        "is_truncated": False,
    }


def _schema(tool: Any) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _role(message: Any) -> str:
    return message["role"]  # messages of verifiers and mappings alike


def _plain(message: Any) -> tuple[str, str]:
    content = message["content"]
    if not isinstance(content, str):
        parts = content or []
        content = "".join(part["text"] for part in parts if part["type"] == "text")
    return _role(message), content


def _observation(message: Any) -> Message:
    role, content = _plain(message)
    return {"role": role, "content": content}


@contextmanager
def _own_signals() -> Iterator[None]:
    """An environment of verifiers takes the signals that end a process; ours are put back."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
