"""Prompt tokens of a model call. Tokens of earlier calls of the episode are taken over, never tokenized again."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from fsdptrain.agents.calls import CallError, ModelCall, ToolCall
from fsdptrain.agents.record import AnsweredCall, Conversation, Record, conversation_of
from fsdptrain.agents.wire import template_call
from fsdptrain.config import DataConfig
from fsdptrain.data.chat import TurnRenderer
from fsdptrain.data.prompts import reads, render_calls
from fsdptrain.data.text import render_chat, response_text, tokens_of
from fsdptrain.errors import DataError
from fsdptrain.rollout.stop_strings import stop_end
from fsdptrain.types import Message

_TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


class CallRenderer:
    """Renders calls with the tokenizer's chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> None:
        self.tokenizer = tokenizer
        self.data = data
        self._turns = TurnRenderer(tokenizer, data=data)
        self.token_text = lru_cache(maxsize=None)(lambda token: str(tokenizer.decode([token])))

    def prompt_of(self, call: ModelCall, record: Record) -> tuple[list[int], AnsweredCall | None, Conversation]:
        """Return the prompt tokens, the call that they continue, and the key of the conversation. Raises CallError."""
        if not self.data.apply_chat_template:
            raise CallError(400, "chat needs a chat template, which --no-apply-chat-template turns off")
        conversation = conversation_of(call.messages, call.tools)
        parent, length = record.continued_by(conversation)
        try:
            if parent is not None:
                ids = parent.token_ids
                calls = call.messages[length - 2].get("tool_calls", ())
                between = self._turns.between(call.messages[length - 1 :], last_token=ids[-1], calls=calls)
                return [*ids, *between], parent, conversation
            ids = tokens_of(self._render(call), self.tokenizer)
        except DataError as error:
            raise CallError(400, str(error), param="messages") from error
        return ids, record.continued_by_tokens(ids), conversation

    def _render(self, call: ModelCall) -> str:
        if call.tools and not reads(self.tokenizer, "tools"):
            raise DataError("the chat template does not read tools: describe them in a message")

        def render(messages: list[Message]) -> str:
            return render_chat(messages, self.tokenizer, self.data, generation=True, tools=call.tools or None)

        try:
            return render_calls(list(call.messages), render)[1]
        except DataError as error:
            raise DataError(f"the chat template does not support these messages: {error}") from error

    def until_stop(
        self, token_ids: Sequence[int], stop: Sequence[str], kept: Sequence[str] = (), *, stopped: bool
    ) -> tuple[int, str, bool]:
        """Cut a response at the first of the texts `stop` and `kept`. Returns the number of tokens, the text, and
        whether it was cut: the tokens end with the one that completes the stop text.

        The text contains it if it is one of `kept`. stopped: the response ends with a stop token, which the text does
        not contain."""
        end = stop_end(token_ids, [*stop, *kept], self.tokenizer) if stop or kept else None
        if end is None:
            return len(token_ids), response_text(token_ids, self.tokenizer, stopped=stopped), False
        text = response_text(token_ids[:end], self.tokenizer, stopped=False)
        places = [place for place in (text.find(word) for word in stop) if place >= 0]
        return end, text[: min(places, default=len(text))], True

    def tool_calls_of(
        self,
        text: str,
        token_ids: Sequence[int],
        call: ModelCall,
        prompt_ids: Sequence[int],
        *,
        number: tuple[int, int],
    ) -> tuple[str, list[ToolCall]]:
        """Return the content of a response without its tool calls, and these. Their ids are made from `number`.

        Reads the format of the tokenizer's `response_template` if it has one, else <tool_call>{JSON}</tool_call>.
        """
        if not call.tools:
            return text, []
        if getattr(self.tokenizer, "response_template", None) is not None:
            content, calls = self._parsed(text, token_ids, call, prompt_ids)
        else:
            content = _TOOL_CALL.sub("", text).strip()
            calls = [found for match in _TOOL_CALL.finditer(text) if (found := _read(match[1])) is not None]
        if not calls:
            return text, []
        ids = [f"{number[0]:05d}{number[1]:02d}{i:02d}" for i in range(len(calls))]  # Mistral needs 9 letters or digits
        return content, [ToolCall(id_, *found) for id_, found in zip(ids, calls, strict=True)]

    def _parsed(
        self, text: str, token_ids: Sequence[int], call: ModelCall, prompt_ids: Sequence[int]
    ) -> tuple[str, list[tuple[str, str]]]:
        tokenizer: Any = self.tokenizer
        try:
            message = tokenizer.parse_response(list(token_ids), prefix=list(prompt_ids), tools=list(call.tools))
        except Exception:  # noqa: BLE001  # of a response that does not fit the format
            return text, []
        calls = [
            (found["function"]["name"], _as_json(found["function"]["arguments"]))
            for found in message.get("tool_calls") or ()
        ]
        return str(message.get("content") or ""), calls


def _as_json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _read(text: str) -> tuple[str, str] | None:
    """Return the name and the arguments of a call in JSON, None if it is none."""
    try:
        found = json.loads(text)
        return str(found["name"]), _as_json(found.get("arguments", {}))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def assistant_message(content: str, calls: Sequence[ToolCall]) -> Mapping[str, Any]:
    """Return the model's message in the form of `ModelCall.messages`."""
    message = {"role": "assistant", "content": content}
    return {**message, "tool_calls": [template_call(c.id, c.name, c.arguments) for c in calls]} if calls else message
