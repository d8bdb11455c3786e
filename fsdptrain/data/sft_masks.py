"""Tokens of a conversation and the exact mask of its trained turns.

The chat template renders the whole conversation. A turn is found by the template's generation tags, or by rendering the
messages before and up to it; both renderings must be prefixes of the whole one, and end between two tokens. There is no
approximate mask: a turn whose bounds are unknown, or lie within a token, raises UnusableRowError.
"""

import re
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from fsdptrain.config import DataConfig
from fsdptrain.config.data import LossOn
from fsdptrain.data.prompts import check_template, render_with_system, system_prompt_of
from fsdptrain.data.sft_forms import WITH_TOOLS, Conversation, UnusableRowError, not_shown, turn_weights, warn_once
from fsdptrain.data.text import encoded, render_chat
from fsdptrain.errors import ConfigError, DataError

_TAGS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_FIX = "use a template with generation tags, or --sft-loss-on last or all"

Span = tuple[int, int]  # of characters


@dataclass(frozen=True)
class ConversationEncoder:
    """Converts conversations to tokens and masks, with the tokenizer's chat template."""

    tokenizer: PreTrainedTokenizerBase
    data: DataConfig
    loss_on: LossOn

    def encode(self, conversation: Conversation) -> tuple[list[int], list[float]]:
        """Return token ids (L,) and their weights (L,). Raises UnusableRowError; ConfigError without a template."""
        if not self.data.apply_chat_template:
            raise ConfigError("--no-apply-chat-template: the data has conversations, which need the chat template")
        check_template(self.tokenizer, self.data)
        if not any(message["role"] == "assistant" for message in conversation.messages):
            raise UnusableRowError("no assistant turn", "no message is of the assistant")
        conversation, text = self._prepared(conversation)
        weights = turn_weights(conversation.messages, self.loss_on)
        self._check_is_shown(conversation, text, weights)
        ids, offsets = self._tokenize(text)
        found = [0.0] * len(ids)
        spans = [((0, len(text)), 1.0)] if self.loss_on == "all" else self._spans(conversation, text, weights)
        for (start, end), weight in spans:
            first, stop = (self._tokens_before(text, ids, offsets, place) for place in (start, end))
            found[first:stop] = [weight] * (stop - first)
        return ids, found

    def _prepared(self, conversation: Conversation) -> tuple[Conversation, str]:
        """Return the conversation with --system-prompt, in the form that the template renders, and the rendering."""
        messages, text = render_with_system(
            conversation.messages,
            system_prompt_of(self.data),
            lambda messages: self._render(replace(conversation, messages=messages)),
        )
        return replace(conversation, messages=messages), text

    def _check_is_shown(self, conversation: Conversation, text: str, weights: Sequence[float]) -> None:
        """Raise UnusableRowError if the template omits tools, tool calls or results, reasoning or trained text."""
        messages = conversation.messages
        for error in not_shown(messages, text, lambda messages: self._render(replace(conversation, messages=messages))):
            if error.kind != "ignored":
                raise error
            warn_once(str(error))
        without = None
        with suppress(UnusableRowError):  # the template refuses it, so it reads tools
            without = self._render(replace(conversation, tools=None)) if conversation.tools else None
        if without == text:
            raise UnusableRowError("tools", f"the chat template does not show tools: {WITH_TOOLS}")
        trained = [m["content"] for m, w in zip(messages, weights, strict=True) if w and m["role"] == "assistant"]
        for content in trained if self.loss_on == "assistant" else trained[-1:]:
            if "".join(content.split()) not in "".join(text.split()):
                raise UnusableRowError(
                    "inexact mask",
                    "the chat template drops or changes what the assistant says, often its thoughts: write the last "
                    f"turn into a column `completion`, which is trained as it is, or {_FIX}",
                )

    def _spans(self, conversation: Conversation, text: str, weights: Sequence[float]) -> list[tuple[Span, float]]:
        """Return the spans of the trained turns, with their weights. weights: of all messages."""
        if _TAGS.search(self._template(conversation)):
            spans = self._tagged_spans(conversation, text)
            turns = [w for m, w in zip(conversation.messages, weights, strict=True) if m["role"] == "assistant"]
            if len(spans) == len(turns):
                return [(span, weight) for span, weight in zip(spans, turns, strict=True) if weight]
            if spans and len({*turns}) == 1 and turns[0]:
                return [(span, turns[0]) for span in spans]
        return [(self._turn(conversation, text, index), weight) for index, weight in enumerate(weights) if weight]

    def _turn(self, conversation: Conversation, text: str, index: int) -> Span:
        """Return the span of message `index`, by rendering the messages before it and up to it."""
        messages = conversation.messages
        if index == 0:  # templates cannot render an empty conversation
            raise UnusableRowError("inexact mask", "the conversation begins with the assistant: use generation tags")
        start = self._render(replace(conversation, messages=messages[:index]), generation=True)
        is_last = index == len(messages) - 1
        end = text if is_last else self._render(replace(conversation, messages=messages[: index + 1]))
        for rendered in (start, end):
            if not text.startswith(rendered):
                raise UnusableRowError(
                    "inexact mask",
                    f"the chat template renders message {index} otherwise within the conversation than at its end, so "
                    f"its tokens are not known exactly: {_FIX}",
                )
        return len(start), len(end)

    def _tagged_spans(self, conversation: Conversation, text: str) -> list[Span]:
        """Return the non-empty spans within generation tags."""
        [rendered], [spans] = render_jinja_template(
            conversations=[[dict(message) for message in conversation.messages]],
            tools=conversation.tools,
            chat_template=self._template(conversation),
            return_assistant_tokens_mask=True,
            **{**self.tokenizer.special_tokens_map, **self.data.chat_template_kwargs},
        )
        assert rendered == text, "the template renders the same messages differently"
        return [(int(start), int(end)) for start, end in spans if start < end]

    def _tokens_before(self, text: str, ids: Sequence[int], offsets: Sequence[Span], place: int) -> int:
        """Return the number of tokens of `text[:place]`. Raises UnusableRowError if a token contains `place`."""
        if place == len(text):
            return len(ids)
        count = bisect_left(offsets, (place, 0))
        if 0 < count < len(offsets) and offsets[count - 1][1] == place == offsets[count][0]:
            return count
        before, _ = self._tokenize(text[:place])  # offsets may leave out the space before a word
        if list(ids[: len(before)]) != before:
            around = text[max(0, place - 10) : place + 10]
            raise UnusableRowError(
                "inexact mask", f"a token joins the beginning or end of a turn to the text beside it: {around!r}"
            )
        return len(before)

    def _render(self, conversation: Conversation, *, generation: bool = False) -> str:
        try:
            return render_chat(
                conversation.messages, self.tokenizer, self.data, generation=generation, tools=conversation.tools
            )
        except DataError as error:
            raise UnusableRowError("template", f"the chat template cannot render it: {error}") from error

    def _tokenize(self, text: str) -> tuple[list[int], list[Span]]:
        """Return the tokens of a text and their places in it; no places if the tokenizer does not know them."""
        fast = bool(self.tokenizer.is_fast)
        found = encoded(text, self.tokenizer, return_offsets_mapping=fast)
        return list(found["input_ids"]), list(found["offset_mapping"]) if fast else []

    def _template(self, conversation: Conversation) -> str:
        """Return the template: a tokenizer may have one for conversations with tools."""
        return str(self.tokenizer.get_chat_template(tools=conversation.tools))
