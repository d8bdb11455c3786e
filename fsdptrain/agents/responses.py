"""Responses of the OpenAI API."""

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, ValidationError

from fsdptrain.agents.calls import Answer, CallError, Choice, ModelCall
from fsdptrain.agents.wire import (
    Body,
    Conversations,
    Function,
    ModelRequest,
    Text,
    event,
    refusal,
    template_call,
    usage,
)


class MessageItem(Body, ignored="type id status phase"):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text


class FunctionCall(Body, ignored="type id status"):
    call_id: str
    name: str
    arguments: str


class FunctionCallOutput(Body, ignored="type id status"):
    call_id: str
    output: Text


_ITEMS = {"message": MessageItem, "function_call": FunctionCall, "function_call_output": FunctionCallOutput}


_ECHOED = {"instructions", "previous_response_id", "max_output_tokens", "temperature", "top_p", "tool_choice"}


class FlatTool(Function):
    type: Literal["function"]


class TextConfig(Body, ignored="verbosity", neutral={"format": ({"type": "text"},)}):
    pass


class ResponsesRequest(
    ModelRequest,
    ignored="include max_tool_calls metadata parallel_tool_calls prompt_cache_key prompt_cache_options "
    "prompt_cache_retention reasoning safety_identifier service_tier store stream_options truncation user",
    neutral={"background": (False,), "top_logprobs": (0,)},
):
    input: Annotated[list[Any], BeforeValidator(lambda items: [_user(items)] if isinstance(items, str) else items)]
    instructions: str | None = None
    tools: Sequence[FlatTool] = ()
    tool_choice: Literal["auto", "none"] = "auto"
    max_output_tokens: int | None = Field(None, ge=1)
    previous_response_id: str | None = None
    text: TextConfig = TextConfig()
    _messages: list[dict[str, Any]] = PrivateAttr(default_factory=list)  # without the instructions

    def to_call(self, conversations: Conversations) -> ModelCall:
        if self.previous_response_id is not None:
            if self.previous_response_id not in conversations:
                message = f"previous_response_id={self.previous_response_id}: this episode has no such response"
                raise CallError(400, message, param="previous_response_id", code="previous_response_not_found")
            self._messages.extend(map(dict, conversations[self.previous_response_id]))
        for index, item in enumerate(self.input):
            _add(self._messages, item, f"input[{index}]")
        instructions = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if not self._messages:
            raise CallError(400, "input: has no messages", param="input", code="invalid_value")
        return ModelCall(
            messages=[*instructions, *self._messages],
            tools=[] if self.tool_choice == "none" else [tool.for_template() for tool in self.tools],
            max_tokens=self.max_output_tokens,
            sampling=self.sampling,
        )

    def to_body(self, answer: Answer, model: str, conversations: Conversations) -> dict[str, Any]:
        choice = answer.choices[0]
        id_, counts = f"resp_{uuid.uuid4().hex}", usage(answer)
        conversations[id_] = [*self._messages, _as_message(choice)]
        is_cut = choice.finish_reason == "length"
        return {
            "id": id_,
            "object": "response",
            "created_at": int(time.time()),
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "error": None,
            "model": model,
            **self.model_dump(include=_ECHOED),
            "tools": [{**tool.model_dump(), "strict": False} for tool in self.tools],
            "parallel_tool_calls": True,
            "output": _output(choice),
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counts["total_tokens"],
            },
        }

    def to_events(self, body: dict[str, Any]) -> Iterator[str]:
        for number, (kind, fields) in enumerate(_events(body)):
            yield event({"type": kind, "sequence_number": number, **fields}, kind)


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _add(messages: list[dict[str, Any]], item: Any, path: str) -> None:
    """Append an item. The calls of a turn belong to one message of the assistant, as the model generated them."""
    kind = str(item.get("type", "message") if isinstance(item, dict) else None)
    if kind == "reasoning":
        return
    if kind not in _ITEMS:
        raise CallError(400, f"{path}.type={kind!r} is not supported", param=f"{path}.type", code="unsupported_value")
    try:
        parsed = _ITEMS[kind].model_validate(item)
    except ValidationError as error:
        raise refusal(error, path) from None
    if isinstance(parsed, FunctionCallOutput):
        messages.append({"role": "tool", "tool_call_id": parsed.call_id, "content": parsed.output})
    elif isinstance(parsed, FunctionCall):
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        call = template_call(parsed.call_id, parsed.name, parsed.arguments)
        messages[-1] = {**messages[-1], "tool_calls": [*messages[-1].get("tool_calls", ()), call]}
    elif isinstance(parsed, MessageItem):
        role = "system" if parsed.role == "developer" else parsed.role
        messages.append({"role": role, "content": parsed.content})


def _as_message(choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.content}
    if choice.tool_calls:
        message["tool_calls"] = [template_call(call.id, call.name, call.arguments) for call in choice.tool_calls]
    return message


def _output(choice: Choice) -> list[dict[str, Any]]:
    status = "incomplete" if choice.finish_reason == "length" else "completed"
    items: list[dict[str, Any]] = []
    if choice.content or not choice.tool_calls:
        part = {"type": "output_text", "text": choice.content, "annotations": [], "logprobs": []}
        items.append({"type": "message", "id": _id("msg"), "status": status, "role": "assistant", "content": [part]})
    for call in choice.tool_calls:
        fields = {"call_id": call.id, "name": call.name, "arguments": call.arguments, "status": "completed"}
        items.append({"type": "function_call", "id": _id("fc"), **fields})
    return items


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _events(body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    started = {**body, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    yield "response.created", {"response": started}
    yield "response.in_progress", {"response": started}
    for index, item in enumerate(body["output"]):
        at = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "message":
            part = item["content"][0]
            empty, in_part = {**part, "text": ""}, {**at, "content_index": 0}
            yield _item("added", index, {**item, "status": "in_progress", "content": []})
            yield "response.content_part.added", {**in_part, "part": empty}
            if part["text"]:
                yield "response.output_text.delta", {**in_part, "delta": part["text"], "logprobs": []}
            yield "response.output_text.done", {**in_part, "text": part["text"], "logprobs": []}
            yield "response.content_part.done", {**in_part, "part": part}
        else:
            arguments = item["arguments"]
            yield _item("added", index, {**item, "status": "in_progress", "arguments": ""})
            yield "response.function_call_arguments.delta", {**at, "delta": arguments}
            yield "response.function_call_arguments.done", {**at, "name": item["name"], "arguments": arguments}
        yield _item("done", index, item)
    yield f"response.{body['status']}", {"response": body}


def _item(what: str, index: int, item: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return f"response.output_item.{what}", {"output_index": index, "item": item}
