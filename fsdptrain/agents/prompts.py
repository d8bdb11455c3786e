"""Prompt tokens of a model call. Tokens of earlier calls of the episode are taken over, never tokenized again."""

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from fsdptrain.agents.calls import CallError, ModelCall, ToolCall
from fsdptrain.agents.record import AnsweredCall, Conversation, Record, conversation_of
from fsdptrain.config import DataConfig
from fsdptrain.data.chat import TurnRenderer
from fsdptrain.data.prompts import template_reason
from fsdptrain.errors import DataError

_TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


class CallRenderer:
    """Renders calls with the tokenizer's chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> None:
        self.tokenizer = tokenizer
        self.data = data
        self._turns = TurnRenderer(tokenizer, data=data)
        self.token_text = lru_cache(maxsize=None)(lambda token: str(tokenizer.decode([token])))

    def prompt_of(self, call: ModelCall, record: Record) -> tuple[list[int], AnsweredCall | None, Conversation | None]:
        """Return the prompt tokens, the call that they continue, and the key of the conversation. Raises CallError."""
        if call.messages is not None:
            return self._of_messages(call, record)
        if call.token_ids is not None:
            return list(call.token_ids), record.continued_by_tokens(call.token_ids), None
        assert call.text is not None
        if (earlier := record.continued_by_text(call.text)) is not None:
            return [*earlier.token_ids, *self._tokenize(call.text[len(earlier.text) :])], earlier, None
        return list(self.tokenizer(call.text)["input_ids"]), None, None

    def _of_messages(
        self, call: ModelCall, record: Record
    ) -> tuple[list[int], AnsweredCall | None, Conversation | None]:
        assert call.messages is not None
        if not self.data.apply_chat_template:
            raise CallError(400, "chat needs a chat template, which --no-apply-chat-template turns off")
        conversation = conversation_of(call.messages, call.tools)
        earlier, length = record.continued_by(conversation)
        try:
            if earlier is not None:
                new = self._turns.between(call.messages[length - 1 :], last_token=earlier.token_ids[-1])
                return [*earlier.token_ids, *new], earlier, conversation
            ids = self._tokenize(self._render(call))
        except DataError as error:
            raise CallError(400, str(error), param="messages") from error
        return ids, record.continued_by_tokens(ids), conversation

    def _render(self, call: ModelCall) -> str:
        options: dict[str, Any] = {**self.data.chat_template_kwargs, **({"tools": call.tools} if call.tools else {})}
        messages: Any = call.messages
        try:
            return str(
                self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
            )
        except Exception as error:
            raise DataError(f"the chat template does not support these messages: {template_reason(error)}") from error

    def _tokenize(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def text_of(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def until_stop(self, token_ids: Sequence[int], stop: Sequence[str]) -> tuple[int, str, bool]:
        """Cut a response at the first of the texts `stop`. Returns the number of tokens, the text, and whether it was
        cut: the tokens end with the one that completes the stop text, which the text does not contain."""
        text = self.text_of(token_ids)
        places = [place for place in (text.find(word) for word in stop) if place >= 0]
        if not places:
            return len(token_ids), text, False
        low, high = 1, len(token_ids)
        while low < high:
            middle = (low + high) // 2
            if any(word in self.text_of(token_ids[:middle]) for word in stop):
                high = middle
            else:
                low = middle + 1
        return low, text[: min(places)], True

    def tool_calls_of(
        self, text: str, token_ids: Sequence[int], call: ModelCall, prompt_ids: Sequence[int]
    ) -> tuple[str, list[ToolCall]]:
        """Return the content of a response without its tool calls, and these.

        Reads the format of the tokenizer's `response_template` if it has one, else <tool_call>{JSON}</tool_call>.
        """
        if not call.tools:
            return text, []
        if getattr(self.tokenizer, "response_template", None) is not None:
            return self._parsed(text, token_ids, call, prompt_ids)
        calls = [found for match in _TOOL_CALL.finditer(text) if (found := _read(match[1])) is not None]
        return (_TOOL_CALL.sub("", text).strip() if calls else text), calls

    def _parsed(
        self, text: str, token_ids: Sequence[int], call: ModelCall, prompt_ids: Sequence[int]
    ) -> tuple[str, list[ToolCall]]:
        tokenizer: Any = self.tokenizer
        try:
            message = tokenizer.parse_response(list(token_ids), prefix=list(prompt_ids), tools=list(call.tools))
        except Exception:  # noqa: BLE001  # of a response that does not fit the format
            return text, []
        calls = [
            tool_call(found["function"]["name"], found["function"]["arguments"])
            for found in message.get("tool_calls") or ()
        ]
        return (str(message.get("content") or "") if calls else text), calls


def tool_call(name: str, arguments: Any) -> ToolCall:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(f"call_{uuid.uuid4().hex[:24]}", name, text)


def _read(text: str) -> ToolCall | None:
    try:
        found = json.loads(text)
        return tool_call(str(found["name"]), found.get("arguments", {}))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def assistant_message(content: str, calls: Sequence[ToolCall]) -> Mapping[str, Any]:
    """Return the model's message in the form of `ModelCall.messages`."""
    if not calls:
        return {"role": "assistant", "content": content}
    tools = [{"id": c.id, "type": "function", "function": {"name": c.name, "arguments": _loaded(c)}} for c in calls]
    return {"role": "assistant", "content": content, "tool_calls": tools}


def _loaded(call: ToolCall) -> Any:
    try:
        return json.loads(call.arguments)
    except ValueError:
        return call.arguments
