"""Forms of supervised data: conversations, text, tokens, or prompts with responses. See docs/sft.md."""

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

from fsdptrain.config import DataConfig
from fsdptrain.config.data import LossOn, SftConfig
from fsdptrain.data.rows import Row
from fsdptrain.data.tables import plain, refuse_columns, value_in, written_chat
from fsdptrain.errors import ConfigError, DataError
from fsdptrain.types import Message, Prompt

log = logging.getLogger(__name__)

Values = Mapping[str, Any]  # a row of a table, by column
_KNOWN = "messages; prompt with completion or label; text; input_ids with labels"
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # keys of a message, by the template
_ROLES = ("system", "user", "assistant", "tool")
_WEIGHTS = ("weight", "train", "training", "loss", "trainable", "loss_mask", "step_loss_mask")  # of a message
_ROW_WEIGHTS = _WEIGHTS[:3]
_NO_LOSS = -100  # label of a token without a loss
WITH_TOOLS = "use the template of a model with tools"
_OMITTED = {  # key of a message -> kind of the error, and the fix
    **dict.fromkeys(("tool_calls", "tools"), ("tools", WITH_TOOLS)),
    **dict.fromkeys(THOUGHTS, ("reasoning", "write it into content, in <think></think>, or remove it")),
}
_NOT_RENDERED = {"role", "content", "tool_call_id", *_WEIGHTS}  # keys of messages
_CONVERTED = {"conversations": "ShareGPT", "instruction": "Alpaca"}  # column -> form that users convert


class UnusableRowError(DataError):
    """A row that cannot be trained. Supervised training skips and counts it. kind: the reason, for counting.

    It is the label of a row whose columns have other values than its form needs.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Conversation:
    """Messages, of which the assistant turns may be trained."""

    messages: list[Message]
    tools: list[Any] | None = None  # schemas, as the chat template gets them


@dataclass(frozen=True)
class Text:
    """Text to train on as it is, followed by the end-of-sequence token."""

    text: str


@dataclass(frozen=True)
class Tokens:
    """A row that was tokenized before."""

    token_ids: list[int]  # (L,)
    loss_mask: list[bool]  # (L,)


def form_reader(
    first: Values, data: DataConfig, sft: SftConfig, *, where: str
) -> tuple[DataConfig, Callable[[Values, str], Row] | None]:
    """Return the columns of a table by its first row, and the function that converts rows. Logs the form.

    None: the rows have a prompt and a response in columns. Raises DataError for an unknown form, and ConfigError for an
    option that has no effect on it.
    """
    form, data = _detect(first, data, where)
    if form == "response":
        log.info("%s: prompts in the column %s, responses in %s", where, data.input_key, data.label_key)
        return data, None
    log.info("%s: %s in the column %s", where, form, data.input_key)
    if form != "messages" and data.system_prompt not in ("auto", ""):
        raise ConfigError(f"--system-prompt has no effect on {where}, which is {form} without messages: remove it")
    if sft.loss_on in {"text": ("last",), "tokens": ("last", "all")}.get(form, ()):
        raise ConfigError(f"--sft-loss-on {sft.loss_on} has no effect on {where}, which is {form}: remove it")
    convert = {"messages": _messages, "text": _text, "tokens": _tokens}[form]

    def read(values: Values, row_id: str) -> Row:
        values = plain(values)
        refuse_columns(values, row_id, "chat_template_kwargs")
        weights = {name: values[name] for name in _ROW_WEIGHTS if values.get(name) is not None}
        try:
            return Row(row_id, *convert(values, data.input_key), metadata=weights)
        except UnusableRowError as error:
            return Row(row_id, row_id, UnusableRowError(error.kind, f"row {row_id}: {error}"))

    return data, read


def turn_weights(messages: Sequence[Message], loss_on: LossOn) -> list[float]:
    """Return the weight of each message in the loss. Raises UnusableRowError for a weight that has no effect."""
    roles, weights = [message["role"] for message in messages], [weight_of(message) for message in messages]
    for role, weight in zip(roles, weights, strict=True):
        if weight not in ((1.0,) if loss_on == "all" else (0.0, 1.0)) and (loss_on == "all" or role != "assistant"):
            line = f"a message of {role} has the weight {weight:g}, and --sft-loss-on {loss_on} does not weight it"
            raise UnusableRowError("weight", line)
    turns = [index for index, role in enumerate(roles) if role == "assistant" or loss_on == "all"]
    trained = turns[-1:] if loss_on == "last" else turns
    return [weight * (index in trained) for index, weight in enumerate(weights)]


def weight_of(values: Values, *, is_row: bool = False) -> float:
    """Return the weight of a message, or of a row, in the loss: the product of what has these keys; 1 without any."""
    weight = 1.0
    for name in _ROW_WEIGHTS if is_row else _WEIGHTS:
        value: Any = values.get(name)
        try:
            weight *= 1.0 if value in (None, "") else float(value)
        except (TypeError, ValueError, OverflowError):
            weight = math.nan
        if not 0.0 <= weight < math.inf:
            raise UnusableRowError("weight", f"{name} is {value!r:.40}, not a weight in the loss, 0 or more")
    return weight


def usable_or_marked(read: Callable[[Values, str], Row]) -> Callable[[Values, str], Row]:
    """Return `read` with rows marked as unusable in place of a DataError."""

    def marked(values: Values, row_id: str) -> Row:
        try:
            return read(values, row_id)
        except DataError as error:
            return Row(row_id, row_id, UnusableRowError("columns", str(error)))

    return marked


def _detect(first: Values, data: DataConfig, where: str) -> tuple[str, DataConfig]:
    """Return the form, and `data` with its columns. Columns that are named by options are respected."""
    if (data.input_key, data.label_key) == (DataConfig().input_key, DataConfig().label_key):
        if "input_ids" in first and "labels" in first:
            return "tokens", data.model_copy(update={"input_key": "input_ids", "label_key": "labels"})
        if "messages" in first:
            return "messages", data.model_copy(update={"input_key": "messages"})
        if "prompt" in first and ("completion" in first or "label" in first):
            return "response", data.model_copy(update={"label_key": "completion"} if "completion" in first else {})
        if "text" in first:
            return "text", data.model_copy(update={"input_key": "text", "label_key": ""})
        if form := next((form for column, form in _CONVERTED.items() if column in first), None):
            fix = "make a column `messages` of it with `datasets`, as docs/sft.md shows"
            raise DataError(f"{where} has the {form} form: {fix}")
        raise DataError(
            f"{where} has none of the known forms of supervised data ({_KNOWN}): its columns are {', '.join(first)}; "
            "name the prompt and the response by --input-key and --label-key"
        )
    value = first.get(data.input_key)
    if isinstance(value, list) and data.label_key not in first and value_in(first, data.label_key) is None:
        return "messages", data
    return ("text" if isinstance(value, str) and not data.label_key else "response"), data


def _messages(values: Values, column: str) -> tuple[list[Message], Conversation]:
    value = values.get(column)
    value = without_none(written_chat(value) if isinstance(value, str) else value)
    if not isinstance(value, list) or not value or not all(isinstance(message, Mapping) for message in value):
        raise UnusableRowError("no messages", f"the column {column} holds {value!r:.60}, not a list of messages")
    messages = [as_message(message) for message in value]
    return messages, Conversation(messages, _as_tools(values.get("tools")))


def _text(values: Values, column: str) -> tuple[str, Text]:
    text = values.get(column)
    if not isinstance(text, str) or not text:
        raise UnusableRowError("no text", f"the column {column} holds {text!r:.40}, not text")
    return text, Text(text)


def _tokens(values: Values, column: str) -> tuple[str, Tokens]:
    """Return tokens as `datasets` of other trainers have them: a label is the token of its place, or -100."""
    columns: list[Any] = [values.get(name) for name in (column, "labels")]
    if not all(isinstance(each, list) and {*map(type, each)} == {int} for each in columns):
        raise UnusableRowError("tokens", f"{column} and labels hold {columns!r:.60}, not lists of token ids")
    ids, labels = columns
    if len(ids) != len(labels) or any(b not in (a, _NO_LOSS) or a < 0 for a, b in zip(ids, labels, strict=True)):
        line = f"{len(labels)} labels do not fit {len(ids)} tokens of {column}: a label is the token of the same place"
        raise UnusableRowError("tokens", f"{line}, not the next one, or -100 for no loss")
    for name, whole in (("attention_mask", [1] * len(ids)), ("position_ids", [*range(len(ids))])):
        if values.get(name) not in (None, whole):
            raise UnusableRowError("tokens", f"{name} shows multiple examples or padding: write one example per row")
    return " ".join(map(str, ids)), Tokens(ids, [label != _NO_LOSS for label in labels])


def episode_of(prompt: Prompt) -> Sequence[Message]:
    """Return the label as messages that start and end with the assistant, without consecutive assistant messages."""
    label: Any = written_chat(prompt.label) if isinstance(prompt.label, str) else prompt.label
    if label is None or label in ("", []):
        raise UnusableRowError(
            "no response", f"row {prompt.id} has no response; --label-key names the column that holds it"
        )
    if isinstance(label, bool | Mapping):
        raise UnusableRowError("no response", f"the response of row {prompt.id} is {label!r:.60}, not text or messages")
    if not isinstance(label, list):
        return [{"role": "assistant", "content": str(label)}]
    is_episode = all(isinstance(m, Mapping) and m.get("role") and isinstance(m.get("content"), str) for m in label)
    for name in ("tool_calls", "function_call", *THOUGHTS):  # their text depends on the template
        if any(isinstance(m, Mapping) and m.get(name) for m in label):
            raise DataError(
                f"--label-key: the response of row {prompt.id} has {name}, which only the chat template can render: "
                "write the whole conversation into one column `messages`, see docs/sft.md"
            )
    is_assistant = [message["role"] == "assistant" for message in label] if is_episode else []
    if not is_episode or not (is_assistant[0] and is_assistant[-1]) or any(a and b for a, b in pairwise(is_assistant)):
        raise UnusableRowError(
            "not an episode",
            f"the response of row {prompt.id} is a list, {str(label)[:80]}; it is messages with role "
            "and content, the first and the last of the assistant, and others between its turns",
        )
    for message in label:
        known = _NOT_RENDERED if message["role"] == "assistant" else {*_NOT_RENDERED, "name"}
        if others := [name for name, value in message.items() if name not in known and value not in (None, "", [])]:
            warn_once(f"--label-key: no message shows its {', '.join(others)}: write them into content, or remove them")
    return label


def as_message(message: Mapping[str, Any], *, parts: bool = False) -> Message:
    """Return a message as chat templates expect it. parts: content that is a list stays one, for images."""
    role, calls = message.get("role"), message.get("tool_calls") or []
    if not isinstance(role, str) or (role not in _ROLES and role.lower() in _ROLES):
        raise UnusableRowError("unknown role", f"a message has the role {role!r}: roles are text in lower case")
    if not isinstance(calls, list):
        raise UnusableRowError("tool calls", f"tool_calls holds {calls!r:.60}, not a list")
    if message.get("function_call"):
        raise UnusableRowError("tool calls", "a message has function_call, the old form of tool_calls: write those")
    if message.get("content") is None and not calls:
        raise UnusableRowError("no content", f"a message of {role} has no content: it has {', '.join(message)}")
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    content = message.get("content")
    found = {**others, "content": content if parts and isinstance(content, list) else _plain_content(content)}
    return found | {"tool_calls": [_as_call(call) for call in calls]} if calls else found


def not_shown(
    messages: Sequence[Message], text: str, render: Callable[[list[Message]], str]
) -> Iterator[UnusableRowError]:
    """Yield an error for each kind of tool results and each key of messages that the template omits from `text`.

    Its kind is `tools`, `reasoning`, or `ignored` for other keys, which are only named.
    """

    def other(changed: list[Message]) -> str | None:
        try:
            return render(changed)
        except DataError:  # the template refuses it, so it reads it
            return None

    results = {index for index, m in enumerate(messages) if m["role"] == "tool" and isinstance(m.get("content"), str)}
    marks = {index: f"result{index}of{len(text)}" for index in results}
    marked = [{**m, "content": m["content"] + marks[i]} if i in marks else m for i, m in enumerate(messages)]
    found = other(marked) if marks else None
    if found is not None and not all(mark in found for mark in marks.values()):
        yield UnusableRowError("tools", f"the chat template does not show messages of the role tool: {WITH_TOOLS}")

    def are_omitted(*names: str) -> bool:
        return other([{key: value for key, value in m.items() if key not in names} for m in messages]) == text

    given = dict.fromkeys(key for m in messages for key, value in m.items() if value not in (None, "", []))
    for name, (kind, fix) in _OMITTED.items():
        if name in given and are_omitted(name):
            yield UnusableRowError(kind, f"the chat template does not show {name}: {fix}")
    others = [name for name in given if name not in _OMITTED and name not in _NOT_RENDERED]
    if others and not are_omitted(*others):
        others = [name for name in others if are_omitted(name)]
    if others:
        line = f"the chat template does not show {', '.join(others)}: write them into content, or remove them"
        yield UnusableRowError("ignored", line)


@cache
def warn_once(line: str) -> None:
    log.warning("%s", line)


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
    inner = call.get("function", call) if isinstance(call, Mapping) else None
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
    if value and not isinstance(value, list):
        raise UnusableRowError("tools", f"the column tools holds {value!r:.60}, not a list of schemas")
    return value or None


def _from_json(text: str, column: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnusableRowError("JSON", f"{column} holds {text!r:.60}, which is not JSON") from error


def without_none(value: Any) -> Any:
    """Return nested data without None: `datasets` gives all mappings of a column the keys of all its rows."""
    if isinstance(value, Mapping):
        return {name: without_none(inner) for name, inner in value.items() if inner is not None}
    return [without_none(inner) for inner in value] if isinstance(value, list) else value
