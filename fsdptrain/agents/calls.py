"""Model calls of an agent, between the endpoint and the sampler."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool by the model."""

    id: str
    name: str
    arguments: str  # JSON


@dataclass(frozen=True)
class ModelCall:
    """One request: messages that the model continues.

    Messages have `role` (system, user, assistant or tool) and `content`, a text. Those of the assistant may have
    `tool_calls`, a list of {"id", "type": "function", "function": {"name", "arguments"}} whose `arguments` are a
    mapping, as chat templates expect them; those of a tool may have `tool_call_id`.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()  # {"type": "function", "function": {...}}, for the chat template
    num_choices: int = 1
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    sampling: Mapping[str, float] = field(default_factory=dict)  # temperature, top_p, ... that the request sets


@dataclass(frozen=True)
class Choice:
    """One response of the model."""

    tool_calls: Sequence[ToolCall]
    content: str  # the text, without what stopped it and without the tool calls
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: Sequence[int]
    tokens: Sequence[str]  # each token as text
    logprobs: Sequence[float]


@dataclass(frozen=True)
class Answer:
    """The response to a call."""

    prompt_token_ids: Sequence[int]
    choices: Sequence[Choice]


class CallError(Exception):
    """A call that is refused: an HTTP error with OpenAI's error object."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


class Episodes(Protocol):
    """The open episodes behind the endpoint. Each has a key, which its calls carry."""

    model: str  # name in /v1/models

    def is_open(self, key: str) -> bool: ...

    async def answer(self, key: str, call: ModelCall) -> Answer:
        """Generate and record. Raises CallError. A cancelled call is not recorded."""
        ...

    def add_reward(self, key: str, reward: Any) -> None:
        """Set the reward of the episode, from its program. Raises CallError for a value that is no reward."""
        ...
