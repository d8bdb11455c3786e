"""The model calls of one episode, and the training sequences that they form.

Calls form trees: a call continues the longest earlier call whose conversation it repeats, and takes over its tokens as
they were sampled. Each path from a first call to a call that nothing continues is a sequence. A call in several paths
is trained in the first of them only.
"""

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdptrain.data.routes import sample_routes
from fsdptrain.types import Completion, Prompt, Sample

Conversation = tuple[Hashable, ...]


@dataclass(eq=False, frozen=True)
class AnsweredCall:
    """A call with its response."""

    parent: "AnsweredCall | None"  # the call that it continues
    number: tuple[int, int]  # order of the calls of an episode, and of the responses to one call
    start: int  # tokens of the path before this call
    prompt_ids: list[int]  # those that this call adds
    completion: Completion
    truncated: bool  # by the limit of the run, not of the request

    @property
    def path(self) -> "list[AnsweredCall]":
        """This call and those that it continues, first call first."""
        path: list[AnsweredCall] = []
        call: AnsweredCall | None = self
        while call is not None:
            path.append(call)
            call = call.parent
        return path[::-1]

    @property
    def token_ids(self) -> list[int]:
        """All tokens of the path, with this response."""
        return [token for call in self.path for token in (*call.prompt_ids, *call.completion.token_ids)]

    @property
    def response_start(self) -> int:
        """Index of the first token of this response in the path."""
        return self.start + len(self.prompt_ids)

    @property
    def end(self) -> int:
        return self.response_start + len(self.completion.token_ids)


@dataclass(eq=False)
class Record:
    """The answered calls of an episode."""

    calls: list[AnsweredCall] = field(default_factory=list)
    _by_conversation: dict[Conversation, AnsweredCall] = field(default_factory=dict)

    def add(self, call: AnsweredCall, conversation: Conversation) -> None:
        """conversation: of the call and its response"""
        self.calls.append(call)
        self._by_conversation.setdefault(conversation, call)

    def continued_by(self, conversation: Conversation) -> tuple[AnsweredCall | None, int]:
        """Return the longest answered call whose conversation `conversation` begins with, and its length."""
        for length in range(len(conversation), 0, -1):
            if (call := self._by_conversation.get(conversation[:length])) is not None:
                return call, length
        return None, 0

    def continued_by_tokens(self, token_ids: Sequence[int]) -> AnsweredCall | None:
        """Return the longest call whose tokens `token_ids` begin with."""
        for call in sorted(self.calls, key=lambda call: -call.end):
            if call.end <= len(token_ids) and call.token_ids == list(token_ids[: call.end]):
                return call
        return None

    def sequences(self) -> list[list[AnsweredCall]]:
        """Return the paths that nothing continues, in the order of their last calls."""
        continued = {id(call.parent) for call in self.calls}
        return [call.path for call in sorted(self.calls, key=lambda call: call.number) if id(call) not in continued]


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
    count, first = path[-1].end, path[0].completion.policy_version
    mask, logprobs, versions = [False] * count, [0.0] * count, [first] * count
    for call in path:
        part = slice(call.response_start, call.end)
        versions[part] = call.completion.token_versions
        if id(call) not in trained:
            mask[part] = [True] * len(call.completion.logprobs)
            logprobs[part] = call.completion.logprobs
    trained.update(map(id, path))
    return Sample(
        group_id=prompt.id,
        token_ids=path[-1].token_ids,
        loss_mask=mask,
        rollout_logprobs=logprobs,
        policy_version=first,
        versions=versions if len(set(versions)) > 1 else None,
        truncated=any(call.truncated for call in path),
        routes=sample_routes([call.completion.routes for call in path], count),
    )
