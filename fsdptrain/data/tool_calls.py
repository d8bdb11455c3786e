"""Render chats with tool calls, in whichever form the template takes their arguments."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from fsdptrain.errors import DataError
from fsdptrain.types import Message


def render_tool_calls(messages: list[Message], render: Callable[[list[Message]], str]) -> tuple[list[Message], str]:
    """See `prompts.render_calls`."""
    arguments = [call.get("function", call).get("arguments") for m in messages for call in m.get("tool_calls") or ()]
    try:
        text = render(messages)
        if not any(isinstance(a, Mapping) and str(a) in text and json.dumps(a) not in text for a in arguments):
            return messages, text
    except DataError:
        pass
    messages = [with_json_arguments(message) for message in messages]
    return messages, render(messages)


def with_json_arguments(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message

    def changed(call: Mapping[str, Any]) -> Mapping[str, Any]:
        inner = call.get("function", call)
        inner = {**inner, "arguments": json.dumps(inner.get("arguments", {}), ensure_ascii=False)}
        return {**call, "function": inner} if "function" in call else inner

    return {**message, "tool_calls": [changed(call) for call in message["tool_calls"]]}
