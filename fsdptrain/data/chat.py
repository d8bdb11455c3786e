"""Tokens between two model turns: end of the model's turn, the observation, start of the next turn.

Model tokens are never rendered again. The chat template renders a short conversation whose assistant message is a known
placeholder; the text after the placeholder is used after any turn. Templates that render earlier turns differently than
they were sampled (Qwen3 drops the reasoning) therefore have no effect: the sample keeps each token as the engine saw
it.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from fsdptrain.config import DataConfig
from fsdptrain.data.prompts import check_template
from fsdptrain.data.rows import as_messages
from fsdptrain.data.text import render_chat, special_tokens, tokens_of, turn_end
from fsdptrain.errors import DataError
from fsdptrain.types import Message

_PLACEHOLDER = "FSDPTRAINSAID"  # placeholder for the assistant's message
_PROBE = "FSDPTRAINPROBE"
_QUESTION = {"role": "user", "content": "?"}
_CHARACTERS = 32  # characters read per token of the observation limit; long observations are cut before tokenization
_CUT = " ..."


class TurnRenderer:
    """Converts observations to tokens with the tokenizer's chat template, or as plain text without a template."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, data: DataConfig, max_observation_len: int | None = None
    ) -> None:
        check_template(tokenizer, data)
        self.tokenizer = tokenizer
        self.data = data
        self.max_observation_len = max_observation_len  # None: no limit

    def between(
        self, observation: str | Sequence[Message], *, last_token: int, calls: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Return the tokens between a model turn that ended with `last_token` and the start of the next model turn.

        An end-of-turn token that the model generated itself is not repeated. `calls` are the tool calls of the turn.
        Messages with the role `tool` become user messages if the template does not support the role. Raises DataError
        if the template rejects the messages.
        """
        messages: list[Message] = [
            {**message, "content": self._plain(message["content"])} for message in as_messages(observation)
        ]
        if not self.data.apply_chat_template:
            return tokens_of("\n".join(message["content"] for message in messages), self.tokenizer)
        has_tools = any(message["role"] == "tool" for message in messages) and not self._supports_tool_role
        text = self._render_after_calls(messages, calls) if has_tools else self._render_after_turn(messages)
        if text is None:  # templates without tools often require alternating roles
            merged = {"role": "user", "content": "\n".join(message["content"] for message in messages)}
            text = self._render_after_turn([merged])
        tokens = tokens_of(text, self.tokenizer)
        return tokens[self._num_already_sampled(tokens, last_token) :] if last_token in self._special else tokens

    def _plain(self, text: str) -> str:
        """Truncate `text` to `max_observation_len` tokens and remove special tokens, which could end the turn."""
        limit = self.max_observation_len
        if limit is None:
            return self._special_text.sub(" ", text)
        plain = self._special_text.sub(" ", text[: _CHARACTERS * limit])
        ids = tokens_of(plain, self.tokenizer)
        if len(ids) <= limit and len(text) <= _CHARACTERS * limit:
            return plain
        return str(self.tokenizer.decode(ids[:limit])).rstrip("\ufffd") + _CUT

    def _num_already_sampled(self, tokens: Sequence[int], last_token: int) -> int:
        """Return how many leading `tokens` the turn that ended with the special `last_token` already contains.

        Counts up to that token, which may also be the first one of the next message (GLM). If the model ends its turns
        with another token than the template (Llama's <|eom_id|>), counts up to the template's end-of-turn token.
        """
        closing = len(tokens_of(self._render_after_turn([], generation=False), self.tokenizer))
        head = tokens[: max(1, closing)]
        if last_token in head:
            return head.index(last_token) + 1
        return next((index + 1 for index, token in enumerate(tokens[:closing]) if token in self._special), 0)

    def _render_after_turn(self, messages: Sequence[Message], *, generation: bool = True) -> str:
        """Render the template text between the assistant's message and its next turn."""
        chat = [_QUESTION, {"role": "assistant", "content": _PLACEHOLDER}, *messages]
        try:
            text = render_chat(chat, self.tokenizer, self.data, generation=generation)
        except DataError as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise DataError(
                f"the chat template of --hf-checkpoint does not support {roles} after an assistant message: {error}"
            ) from error
        before, placeholder, after = text.partition(_PLACEHOLDER)
        if not placeholder:
            raise DataError("the chat template of --hf-checkpoint omits the assistant message: " + before[:80])
        return after

    def _render_after_calls(self, messages: list[Message], calls: Sequence[Mapping[str, Any]]) -> str | None:
        """Render after a turn with `calls`, for templates that show results of tools only there. None: it shows none.

        Without `calls`, each result gets one, with the name in its message.
        """
        answers: list[Any] = [
            {"tool_call_id": f"{index:09d}", "name": "tool", **message} if message["role"] == "tool" else message
            for index, message in enumerate(messages)
        ]
        called = calls or [
            {"id": m["tool_call_id"], "type": "function", "function": {"name": m["name"], "arguments": {}}}
            for m in answers
            if m["role"] == "tool"
        ]
        chat = [_QUESTION, {"role": "assistant", "content": "", "tool_calls": called}]
        try:
            turn, silent, text = (
                render_chat([*chat, *heard], self.tokenizer, self.data, generation=generation)
                for heard, generation in (([], False), ([], True), (answers, True))
            )
        except DataError:
            return None
        if text == silent or not text.startswith(turn):
            return None
        return self._render_after_turn([], generation=False) + text[len(turn) :]

    @cached_property
    def end(self) -> int | None:
        """The token with which the chat template ends a turn of the model."""
        return turn_end(self.tokenizer, self.data) if self.data.apply_chat_template else None

    @cached_property
    def _supports_tool_role(self) -> bool:
        """Whether the template supports the role `tool`. Some templates raise, others omit the message."""
        try:
            return _PROBE in self._render_after_turn([{"role": "tool", "content": _PROBE}])
        except DataError:
            return False

    @cached_property
    def _special(self) -> frozenset[int]:
        return special_tokens(self.tokenizer)

    @cached_property
    def _special_text(self) -> re.Pattern[str]:
        texts = self.tokenizer.convert_ids_to_tokens(sorted(self._special))
        return re.compile("|".join(re.escape(text) for text in texts) or r"(?!)")
