"""Forms of supervised data: which one a table has, and its rows as conversations, responses or text."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdptrain.config import DataConfig
from fsdptrain.config.sft import SftConfig
from fsdptrain.data.rows import Row, value_in
from fsdptrain.errors import ConfigError, DataError
from fsdptrain.types import Message

log = logging.getLogger(__name__)

Values = Mapping[str, Any]  # a row of a table, by column
COLUMNS: Mapping[str, tuple[str, ...]] = {  # columns that a form needs; the first form that fits is taken
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "completion": ("prompt", "completion"),
    "label": ("prompt", "label"),
    "text": ("text",),
}
_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "model": "assistant",
    "chatgpt": "assistant", "system": "system", "tool": "tool", "observation": "tool", "function_response": "tool",
    "function_call": "assistant",
}  # fmt: skip
_KNOWN = "messages; conversations; instruction and output; prompt and completion; text; prompt and label"


class UnusableRowError(DataError):
    """A row that cannot be trained. Supervised training skips and counts it. kind: the reason, for counting."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Conversation:
    """Messages, of which the assistant turns from index `first` on may be trained."""

    messages: list[Message]
    tools: list[Any] | None = None  # schemas, as the chat template gets them
    first: int = 0


@dataclass(frozen=True)
class Text:
    """Text to train on as it is, followed by the end-of-sequence token."""

    text: str


@dataclass(frozen=True)
class Unusable:
    """A row whose columns have other values than its form needs."""

    error: UnusableRowError


def form_reader(first: Values, data: DataConfig, sft: SftConfig, *, where: str) -> Callable[[Values, str], Row] | None:
    """Return the function that converts the rows of a table, by its first row, and log the form.

    None: the rows have a prompt and a label, in the columns --input-key and --label-key. Raises DataError for an
    unknown form, and ConfigError for an option that has no effect on it.
    """
    named = data.input_key != DataConfig().input_key
    form = _detect(first, data, where)
    if form == "label":
        log.info("%s: form: prompt and label, in the columns %s and %s", where, data.input_key, data.label_key)
        return None
    columns = (data.input_key,) if named else COLUMNS[form]
    log.info("%s: form: %s, in %s %s", where, form, "columns" if columns[1:] else "column", " and ".join(columns))
    if data.metadata_key is not None:
        raise ConfigError(f"--metadata-key has no effect on {where}, rows of the form {form}: remove it")
    if form == "text" and data.system_prompt not in ("auto", ""):
        raise ConfigError(f"--system-prompt has no effect on {where}, which is text without messages: remove it")
    if form == "text" and sft.loss_on == "last":
        raise ConfigError(f"--sft-loss-on last has no effect on {where}, which is text without turns: remove it")
    convert = {"messages": _messages, "sharegpt": _messages, "alpaca": _alpaca, "completion": _completion}.get(form)

    def read(values: Values, row_id: str) -> Row:
        try:
            prompt, label = convert(values, columns) if convert else _text(values, columns)
        except UnusableRowError as error:
            prompt, label = row_id, Unusable(UnusableRowError(error.kind, f"row {row_id}: {error}"))
        return Row(row_id, prompt, label)

    return read


def usable_or_marked(read: Callable[[Values, str], Row]) -> Callable[[Values, str], Row]:
    """Return `read` with rows marked as unusable in place of a DataError."""

    def marked(values: Values, row_id: str) -> Row:
        try:
            return read(values, row_id)
        except DataError as error:
            return Row(row_id, row_id, Unusable(UnusableRowError("columns", str(error))))

    return marked


def require_labels(rows: Sequence[Row]) -> None:
    """Raise ConfigError unless each row has a prompt and a label, which a reward can compare a response with."""
    for row in rows:
        if isinstance(row.label, Conversation | Text | Unusable):
            raise ConfigError(
                f"--sft-eval-generate needs rows with a prompt and a label; row {row.id} is a conversation or text: "
                "remove it, or name columns by --input-key and --label-key"
            )


def _detect(first: Values, data: DataConfig, where: str) -> str:
    default = DataConfig()
    if (data.input_key, data.label_key) != (default.input_key, default.label_key):
        value = first.get(data.input_key)
        if value_in(first, data.label_key) is not None or data.label_key in first or data.input_key not in first:
            return "label"  # `as_rows` checks the columns
        if isinstance(value, list):
            return "messages"
        return "text" if isinstance(value, str) and not data.label_key else "label"
    for form, columns in COLUMNS.items():
        if all(column in first for column in columns):
            return form
    raise DataError(
        f"{where} has none of the known forms of supervised data ({_KNOWN}): its columns are {', '.join(first)}; "
        "name the prompt and the response by --input-key and --label-key"
    )


def _messages(values: Values, columns: tuple[str, ...]) -> tuple[list[Message], Conversation]:
    """Messages with role and content (OpenAI), or with from and value (ShareGPT)."""
    messages = _with_system(values, _as_messages(values.get(columns[0]), columns[0]))
    return messages, Conversation(messages, _as_tools(values.get("tools")))


def _completion(values: Values, columns: tuple[str, ...]) -> tuple[Any, Any]:
    """A prompt and a completion: two strings, or two lists of messages."""
    prompt, completion = (_maybe_messages(values.get(column)) for column in columns)
    if isinstance(prompt, str) and isinstance(completion, str):
        _refuse_tools(values)
        return prompt, completion
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _as_messages(prompt, columns[0])
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    after = _as_messages(completion, columns[1])
    return before, Conversation([*before, *after], _as_tools(values.get("tools")), first=len(before))


def _maybe_messages(value: Any) -> Any:
    """Return the messages of JSON text, as in csv files; other text as it is."""
    if not isinstance(value, str) or not value.startswith("["):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    is_chat = bool(found) and all(isinstance(m, Mapping) and ("role" in m or "from" in m) for m in found)
    return found if is_chat else value


def _alpaca(values: Values, _columns: tuple[str, ...]) -> tuple[Any, str]:
    """An instruction, an optional input and an output."""
    instruction, more, output = values.get("instruction"), values.get("input") or "", values.get("output")
    if not (isinstance(instruction, str) and isinstance(more, str) and isinstance(output, str)):
        raise UnusableRowError("not text", "instruction, input and output must be text")
    _refuse_tools(values)
    content = "\n\n".join(filter(None, [instruction, more]))
    messages = _with_system(values, [{"role": "user", "content": content}])
    return messages, output


def _text(values: Values, columns: tuple[str, ...]) -> tuple[str, Text]:
    text = values.get(columns[0])
    if not isinstance(text, str) or not text:
        raise UnusableRowError("no text", f"the column {columns[0]} holds {text!r:.40}, not text")
    return text, Text(text)


def _with_system(values: Values, messages: list[Message]) -> list[Message]:
    """Prepend the column `system`, which ShareGPT and Alpaca data may have."""
    system = values.get("system")
    if not isinstance(system, str) or not system or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def _as_messages(value: Any, column: str) -> list[Message]:
    is_json = isinstance(value, str) and value.startswith("[")  # as in csv files
    value = _from_json(value, column) if is_json else without_none(value)
    if not isinstance(value, list) or not value or not all(isinstance(message, Mapping) for message in value):
        raise UnusableRowError("no messages", f"the column {column} holds {value!r:.60}, not a list of messages")
    return [_as_message(message) for message in value]


def _as_message(message: Mapping[str, Any]) -> Message:
    """Return one message without empty fields: `datasets` fills them with None."""
    known = {name: value for name, value in message.items() if value is not None}
    role = known.pop("role", None)
    if role is None:
        sender, content = known.pop("from", None), known.pop("value", None)
        role = _ROLES.get(str(sender))
        if role is None:
            raise UnusableRowError("unknown role", f"a message is from {sender!r}; known are {', '.join(_ROLES)}")
        if content is None:
            raise UnusableRowError("no content", f"a message from {sender!r} has no value: it has {', '.join(message)}")
        known["content"] = content
        if sender == "function_call":
            known |= {"content": "", "tool_calls": [{"type": "function", "function": _from_json(content, "value")}]}
    if not isinstance(role, str):
        raise UnusableRowError("unknown role", f"a message has the role {role!r}")
    found = {"role": role, **known, "content": _plain_content(known.get("content"))}
    calls = found.pop("tool_calls", None) or []
    if not isinstance(calls, list):
        raise UnusableRowError("tool calls", f"tool_calls holds {calls!r:.60}, not a list")
    if known.get("content") is None and not calls:
        raise UnusableRowError("no content", f"a message of {role} has no content: it has {', '.join(message)}")
    return found | {"tool_calls": [_as_call(call) for call in calls]} if calls else found


def _plain_content(content: Any) -> str:
    """Return the text of a message. Many templates silently drop content that is a list of text parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
        raise UnusableRowError("not text", f"a message holds {content!r:.60}, not text")
    return "".join(part["text"] for part in parts)


def _as_call(call: Any) -> Any:
    """Return a tool call with arguments as a mapping, which most templates expect."""
    if not isinstance(call, Mapping):
        raise UnusableRowError("tool calls", f"a tool call is {call!r:.60}, not a mapping")
    inner = call.get("function", call)
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        raise UnusableRowError("tool calls", f"a tool call has no function name: {call!r:.60}")
    arguments = inner.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _from_json(arguments or "{}", "arguments")
    inner = {**inner, "arguments": arguments}
    return {**call, "function": inner} if "function" in call else inner


def _as_tools(value: Any) -> list[Any] | None:
    """Return the column `tools`: a list of schemas, or its JSON text."""
    if isinstance(value, str):
        value = _from_json(value, "tools") if value.strip() not in ("", "None") else None
    else:
        value = without_none(value)
    if not value:
        return None
    if not isinstance(value, list):
        raise UnusableRowError("tools", f"the column tools holds {value!r:.60}, not a list of schemas")
    return value


def _refuse_tools(values: Values) -> None:
    if _as_tools(values.get("tools")):
        raise UnusableRowError(
            "tools", "tools are shown by the chat template to conversations only: write it as messages"
        )


def _from_json(text: Any, column: str) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise UnusableRowError("JSON", f"{column} holds {text!r:.60}, which is not JSON") from error


def without_none(value: Any) -> Any:
    """Return nested data without None: `datasets` gives all mappings of a column the keys of all its rows."""
    if isinstance(value, Mapping):
        return {name: without_none(inner) for name, inner in value.items() if inner is not None}
    return [without_none(inner) for inner in value] if isinstance(value, list) else value
