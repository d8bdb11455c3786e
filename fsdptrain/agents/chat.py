"""Chat completions of the OpenAI API, with the token ids of vLLM."""

import time
import uuid
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from fsdptrain.agents.calls import Answer, Choice, ModelCall
from fsdptrain.agents.wire import (
    Body,
    ChoicesRequest,
    Conversations,
    Function,
    Text,
    body_call,
    event,
    template_call,
    usage,
)


class CalledFunction(Body):
    name: str
    arguments: str = ""


class EarlierCall(Body):
    ignored = frozenset({"index"})
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    ignored = frozenset({"name", "refusal", "annotations"})
    neutral = {"audio": (), "function_call": ()}
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text = ""
    tool_calls: list[EarlierCall] = []
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [
                template_call(call.id, call.function.name, call.function.arguments) for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


class Tool(Body):
    type: Literal["function"]
    function: Function


class ChatRequest(ChoicesRequest):
    ignored = ChoicesRequest.ignored | {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "reasoning_effort",
        "safety_identifier",
        "service_tier",
        "store",
        "verbosity",
    }
    neutral = {
        **ChoicesRequest.neutral,
        "function_call": ("auto", "none"),
        "functions": ([],),
        "modalities": (["text"],),
        "response_format": ({"type": "text"},),
        "top_logprobs": (0,),
    }
    messages: list[Message] = Field(min_length=1)
    tools: list[Tool] = []
    tool_choice: Literal["auto", "none"] = "auto"
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False

    def to_call(self, conversations: Conversations) -> ModelCall:
        return ModelCall(
            messages=[message.for_template() for message in self.messages],
            tools=[] if self.tool_choice == "none" else [tool.function.for_template() for tool in self.tools],
            num_choices=self.n,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            stop=self.stop,
            sampling=self.sampling,
        )

    def to_body(self, answer: Answer, model: str, conversations: Conversations) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model,
            "choices": [self._choice(index, choice) for index, choice in enumerate(answer.choices)],
            "usage": usage(answer),
            **({"prompt_token_ids": list(answer.prompt_token_ids)} if self.return_token_ids else {}),
        }

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.content, "refusal": None}
        if choice.tool_calls:
            message["content"] = choice.content or None
            message["tool_calls"] = [body_call(call) for call in choice.tool_calls]
        return {
            "index": index,
            "message": message,
            "logprobs": {"content": _logprobs(choice), "refusal": None} if self.logprobs else None,
            "finish_reason": choice.finish_reason,
            **self.token_ids(choice),
        }

    def to_events(self, body: dict[str, Any]) -> Iterator[str]:
        chunk = {name: body[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
        prompt = {name: body[name] for name in ("prompt_token_ids",) if name in body}  # in the first chunk only
        for choice in body["choices"]:
            message = choice["message"]
            deltas = [{"content": message["content"]}] if message["content"] else []
            deltas += [{"tool_calls": [{"index": i, **call}]} for i, call in enumerate(message.get("tool_calls", ()))]
            tokens = {name: choice[name] for name in ("logprobs", "token_ids") if name in choice}
            yield event(_chunk(chunk | prompt, choice["index"], {"role": "assistant", "content": ""}))
            prompt = {}
            for delta in deltas:
                yield event(_chunk(chunk, choice["index"], delta, **tokens))
                tokens = {}
            yield event(_chunk(chunk, choice["index"], {}, finish_reason=choice["finish_reason"], **tokens))
        yield from self.usage_events(chunk, body)


def _chunk(chunk: dict[str, Any], index: int, delta: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {**chunk, "choices": [{"index": index, "delta": delta, "finish_reason": None, **fields}]}


def _logprobs(choice: Choice) -> list[dict[str, Any]]:
    return [
        {"token": token, "bytes": list(token.encode()), "logprob": logprob, "top_logprobs": []}
        for token, logprob in zip(choice.tokens, choice.logprobs, strict=True)
    ]
