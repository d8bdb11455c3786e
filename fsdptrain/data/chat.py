"""What stands between two turns of the model, as tokens: what closes its turn, the observation, what opens the next.

The tokens of the model are never rendered again. The chat template is asked for a short conversation whose assistant
says one known word; what it writes behind that word is what it would write behind any turn. So templates that show
earlier turns otherwise than they were sampled (Qwen3 leaves out what was thought) change nothing: the sample keeps each
token as the engine saw it.
"""

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from fsdptrain.config import DataConfig
from fsdptrain.data.prompts import check_template
from fsdptrain.data.sources import as_messages
from fsdptrain.errors import DataError
from fsdptrain.types import Message

_SAID = "FSDPTRAINSAID"  # stands for the words of the assistant
_PROBE = "FSDPTRAINPROBE"
_CHARACTERS = 32  # of an observation that are looked at for each token that may stay: a flood is cut before it costs
_CUT = " ..."


class TurnRenderer:
    """Observations to tokens, in the form of the tokenizer's chat template; without a template, the plain text."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, data: DataConfig, max_observation_len: int | None = None
    ) -> None:
        check_template(tokenizer, data)
        self.tokenizer = tokenizer
        self.data = data
        self.max_observation_len = max_observation_len  # None: nothing is cut

    def between(self, observation: str | Sequence[Message], *, last_token: int) -> list[int]:
        """Tokens from the end of a turn of the model, whose last token was `last_token`, to where its next one begins.

        A token that the model has said itself to end its turn is not said again. A message with the role `tool` becomes
        one of the user where the template cannot show it. DataError where the template takes none of the messages.
        """
        messages = [{**message, "content": self._plain(message["content"])} for message in as_messages(observation)]
        if not self.data.apply_chat_template:
            return self._tokenise("\n".join(message["content"] for message in messages))
        tokens = self._tokenise(self._behind_said(messages if self._shows_tools else _without_tools(messages)))
        return tokens[self._num_said(tokens, last_token) :] if last_token in self._special else tokens

    def _plain(self, text: str) -> str:
        """At most `max_observation_len` tokens of `text`, without special ones: nothing that is said ends its turn."""
        limit = self.max_observation_len
        if limit is None:
            return self._special_text.sub(" ", text)
        plain = self._special_text.sub(" ", text[: _CHARACTERS * limit])
        ids = self._tokenise(plain)
        if len(ids) <= limit and len(text) <= _CHARACTERS * limit:
            return plain
        return str(self.tokenizer.decode(ids[:limit])).rstrip("\ufffd") + _CUT

    def _num_said(self, tokens: Sequence[int], last_token: int) -> int:
        """How many of `tokens` a turn that ended with the special `last_token` holds already.

        Up to that token, which may also be the first of the next message (GLM). The model may have another end of a
        turn than the template (Llama's <|eom_id|>): then up to the template's own.
        """
        closing = len(self._tokenise(self._behind_said([], generation=False)))
        head = tokens[: max(1, closing)]
        if last_token in head:
            return head.index(last_token) + 1
        return next((index + 1 for index, token in enumerate(tokens[:closing]) if token in self._special), 0)

    def _behind_said(self, messages: Sequence[Message], *, generation: bool = True) -> str:
        """What the template writes behind the assistant's words, up to those of its next turn."""
        chat: list[Any] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SAID}, *messages]
        template_kwargs: dict[str, Any] = dict(self.data.chat_template_kwargs)
        try:
            text = self.tokenizer.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=generation, **template_kwargs
            )
        except (TemplateError, ValueError, TypeError) as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise DataError(
                f"the chat template of --hf-checkpoint takes no {roles} behind an answer: {error}"
            ) from error
        before, said, behind = str(text).partition(_SAID)
        if not said:
            raise DataError(
                "the chat template of --hf-checkpoint does not show what the assistant says: " + before[:80]
            )
        return behind

    def _tokenise(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    @cached_property
    def _shows_tools(self) -> bool:
        """The template knows the role `tool`: some raise, some leave the message out."""
        try:
            return _PROBE in self._behind_said([{"role": "tool", "content": _PROBE}])
        except DataError:
            return False

    @cached_property
    def _special(self) -> frozenset[int]:
        added = self.tokenizer.added_tokens_decoder
        return frozenset(self.tokenizer.all_special_ids) | {id_ for id_, token in added.items() if token.special}

    @cached_property
    def _special_text(self) -> re.Pattern[str]:
        texts = self.tokenizer.convert_ids_to_tokens(sorted(self._special))
        return re.compile("|".join(re.escape(text) for text in texts) or r"(?!)")


def _without_tools(messages: Sequence[Message]) -> list[Message]:
    """The same in one message of the user where there were several: templates that lack tools often want roles to
    take turns.
    """
    if not any(message["role"] == "tool" for message in messages):
        return list(messages)
    return [{"role": "user", "content": "\n".join(message["content"] for message in messages)}]
