"""Parse tool calls in the text of a response, in the format of Hermes, Qwen and others."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`"""

    name: str
    arguments: Mapping[str, Any]


def find_tool_calls(text: str) -> list[ToolCall | str]:
    """Return the calls in `text`, in order. An invalid call becomes an error message for the model."""
    return [_parse(match.group(1)) for match in TOOL_CALL.finditer(text)]


def _parse(text: str) -> ToolCall | str:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"error: a tool call must be JSON: {error}"
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return 'error: a tool call must be {"name": ..., "arguments": {...}}'
    arguments = call.get("arguments", {})
    return ToolCall(call["name"], arguments) if isinstance(arguments, dict) else "error: arguments must be an object"
