"""Chat completions of the OpenAI API, with the token ids of vLLM."""

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import Field

from fsdptrain.agents.calls import Answer, Choice, ModelCall
from fsdptrain.agents.wire import Body, Text, Texts, event, template_call, usage


class CalledFunction(Body):
    name: str
    arguments: str = ""


class EarlierCall(Body, ignored="index"):
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body, ignored="name refusal annotations", neutral={"audio": (), "function_call": ()}):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text = ""
    tool_calls: Sequence[EarlierCall] = ()
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


class Function(Body, ignored="strict"):  # generation is not constrained
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class StreamOptions(Body, ignored="include_obfuscation"):
    include_usage: bool = False


class ChatRequest(
    Body,
    ignored="metadata parallel_tool_calls prompt_cache_key prompt_cache_options prompt_cache_retention "
    "reasoning_effort safety_identifier seed service_tier store user verbosity",
    neutral={
        "frequency_penalty": (0,),
        "function_call": ("auto", "none"),
        "functions": ([],),
        "logit_bias": ({},),
        "modalities": (["text"],),
        "presence_penalty": (0,),
        "response_format": ({"type": "text"},),
        "top_logprobs": (0,),
    },
):
    model: str = ""  # any name is served by the model in training
    messages: Sequence[Message] = Field(min_length=1)
    tools: Sequence[Tool] = ()
    tool_choice: Literal["auto", "none"] = "auto"
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    n: int = Field(1, ge=1, le=1024)
    stop: Texts = Field((), max_length=64)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    logprobs: bool = False
    return_token_ids: bool = False  # of vLLM

    def to_call(self) -> ModelCall:
        return ModelCall(
            messages=[message.for_template() for message in self.messages],
            tools=[] if self.tool_choice == "none" else [tool.model_dump(exclude_unset=True) for tool in self.tools],
            num_choices=self.n,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            stop=self.stop,
            sampling=self.model_dump(include={"temperature", "top_p", "top_k", "min_p"}, exclude_none=True),
        )

    def to_body(self, answer: Answer, model: str) -> dict[str, Any]:
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
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in choice.tool_calls
            ]
        logprobs = {"content": _logprobs(choice), "refusal": None} if self.logprobs else None
        body = {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish_reason}
        return {**body, "token_ids": list(choice.token_ids)} if self.return_token_ids else body

    def to_events(self, body: dict[str, Any]) -> Iterator[str]:
        """Yield chunks: for each choice its role, its content, each call, and how it ended."""
        chunk = {name: body[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
        first = {name: body[name] for name in ("prompt_token_ids",) if name in body}
        for choice in body["choices"]:
            message = choice["message"]
            deltas: list[dict[str, Any]] = [{"content": message["content"]}] if message["content"] else []
            deltas += [{"tool_calls": [{"index": i, **call}]} for i, call in enumerate(message.get("tool_calls", ()))]
            chunks = [
                {"delta": delta, "finish_reason": None} for delta in [{"role": "assistant", "content": ""}, *deltas]
            ]
            chunks.append({"delta": {}, "finish_reason": choice["finish_reason"]})
            chunks[1] |= {name: choice[name] for name in ("logprobs", "token_ids") if name in choice}
            for part in chunks:
                yield event({**chunk, **first, "choices": [{"index": choice["index"], **part}]})
                first = {}
        if self.stream_options.include_usage:
            yield event({**chunk, "choices": [], "usage": body["usage"]})
        yield "data: [DONE]\n\n"


def _logprobs(choice: Choice) -> list[dict[str, Any]]:
    return [
        {"token": token, "bytes": list(token.encode()), "logprob": logprob, "top_logprobs": []}
        for token, logprob in zip(choice.tokens, choice.logprobs, strict=True)
    ]
