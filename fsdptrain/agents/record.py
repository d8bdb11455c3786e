"""The model calls of one episode, and the training sequences that they form.

Calls form trees: a call continues the longest earlier call whose conversation it repeats, and takes over its tokens as
they were sampled. Each path from a first call to a call that nothing continues is a sequence. A call in several paths
is trained in the first of them only.
"""

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fsdptrain.data.routes import sample_routes
from fsdptrain.types import Completion, Prompt, Sample

Conversation = tuple[Hashable, ...]


@dataclass(eq=False, frozen=True)
class AnsweredCall:
    """A call with its response. Token fields cover the whole path: earlier calls, this prompt, this response."""

    earlier: "AnsweredCall | None"
    token_ids: list[int]  # (L,)
    response_start: int  # index of the first token of this response
    logprobs: list[float]  # of the response
    versions: list[int]  # of the response
    routes: Tensor | None
    truncated: bool  # by the limit of the run, not of the request
    text: str  # of the path, for calls that continue a text

    @property
    def path(self) -> "list[AnsweredCall]":
        """This call and those that it continues, first call first."""
        return [*(self.earlier.path if self.earlier else ()), self]

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens of the first call of the path."""
        return self.path[0].response_start


@dataclass(eq=False)
class Record:
    """The answered calls of an episode, in the order of their answers."""

    calls: list[AnsweredCall] = field(default_factory=list)
    _by_conversation: dict[Conversation, AnsweredCall] = field(default_factory=dict)

    def add(self, call: AnsweredCall, conversation: Conversation | None) -> None:
        self.calls.append(call)
        if conversation is not None:
            self._by_conversation.setdefault(conversation, call)

    def continued_by(self, conversation: Conversation) -> tuple[AnsweredCall | None, int]:
        """Return the longest answered call whose conversation `conversation` begins with, and its length."""
        for length in range(len(conversation), 0, -1):
            if (call := self._by_conversation.get(conversation[:length])) is not None:
                return call, length
        return None, 0

    def continued_by_tokens(self, token_ids: Sequence[int]) -> AnsweredCall | None:
        """Return the longest call whose tokens `token_ids` begin with."""
        found = [call for call in self.calls if list(token_ids[: len(call.token_ids)]) == call.token_ids]
        return max(found, key=lambda call: len(call.token_ids), default=None)

    def continued_by_text(self, text: str) -> AnsweredCall | None:
        """Return the longest call whose text `text` begins with."""
        found = [call for call in self.calls if call.text and text.startswith(call.text)]
        return max(found, key=lambda call: len(call.text), default=None)

    def sequences(self) -> list[list[AnsweredCall]]:
        """Return the paths that nothing continues, in the order of their last calls."""
        continued = {id(call.earlier) for call in self.calls}
        return [call.path for call in self.calls if id(call) not in continued]


def conversation_of(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> Conversation:
    """Return a key of the conversation. Harnesses may return the model's messages in another form.

    Surrounding whitespace of the model's text, the ids of its tool calls and the spelling of their JSON do not count.
    """
    return (json.dumps(tools, sort_keys=True, default=str), *map(_message_key, messages))


def _message_key(message: Mapping[str, Any]) -> Hashable:
    content = message["content"]
    if message["role"] != "assistant":
        return message["role"], content
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return "assistant", content.strip(), tuple((c["name"], json.dumps(c["arguments"], sort_keys=True)) for c in calls)


def answered(
    completion: Completion, *, prompt_ids: Sequence[int], earlier: AnsweredCall | None, truncated: bool, text: str
) -> AnsweredCall:
    """Build the record of a call. prompt_ids: of the whole path."""
    return AnsweredCall(
        earlier,
        [*prompt_ids, *completion.token_ids],
        len(prompt_ids),
        completion.logprobs,
        completion.token_versions,
        completion.routes,
        truncated,
        text,
    )


def samples_of(prompt: Prompt, record: Record) -> list[Sample]:
    """Return the sequences of an episode, without reward. An episode without calls has its prompt alone, untrained."""
    trained: set[int] = set()
    samples = [_sample(prompt, path, trained) for path in record.sequences()]
    if samples:
        return samples
    count = len(prompt.token_ids)
    return [Sample(prompt.id, prompt.token_ids, [False] * count, [0.0] * count)]


def _sample(prompt: Prompt, path: Sequence[AnsweredCall], trained: set[int]) -> Sample:
    """Build the sample of a path. Adds its calls to `trained`; those that are in it already have no loss."""
    ids = path[-1].token_ids
    mask, logprobs, versions = [False] * len(ids), [0.0] * len(ids), [path[0].versions[0]] * len(ids)
    for call in path:
        part = slice(call.response_start, len(call.token_ids))
        versions[part] = call.versions
        if id(call) not in trained:
            mask[part] = [True] * len(call.logprobs)
            logprobs[part] = call.logprobs
    trained.update(map(id, path))
    return Sample(
        group_id=prompt.id,
        token_ids=ids,
        loss_mask=mask,
        rollout_logprobs=logprobs,
        policy_version=versions[0],
        versions=versions if len(set(versions)) > 1 else None,
        truncated=any(call.truncated for call in path),
        routes=sample_routes([call.routes for call in path], len(ids)),
    )
