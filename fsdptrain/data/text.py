"""Chats to text, text to tokens, and tokens to text."""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from fsdptrain.config import DataConfig
from fsdptrain.distributed import one_line
from fsdptrain.errors import DataError

_ANSWER = "FSDPTRAINSAID"


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    *,
    generation: bool = False,
    **options: Any,
) -> str:
    """Render messages by the chat template. generation: with the beginning of the model's turn.

    options: more arguments of the template, which take precedence over --chat-template-kwargs unless they are None.
    Raises DataError with the reason, for any error of the template.
    """
    chat = [dict(message) for message in messages]
    kwargs: dict[str, Any] = data.chat_template_kwargs | {k: x for k, x in options.items() if x is not None}
    try:
        return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=generation, **kwargs))
    except Exception as error:  # a template can raise anything
        expected = isinstance(error, TemplateError | ValueError | TypeError)  # TypeError: most need text content
        raise DataError(" ".join(str(error).split()) if expected else one_line(error)) from error


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    added = tokenizer.added_tokens_decoder
    return frozenset(tokenizer.all_special_ids) | {id_ for id_, token in added.items() if token.special}


def encoded(text: str, tokenizer: PreTrainedTokenizerBase, **options: Any) -> Mapping[str, Any]:
    """Tokenize a rendered text, or part of a sequence: adds no token. Raises DataError for what is no text."""
    try:
        return tokenizer(text, add_special_tokens=False, **options)
    except (TypeError, UnicodeError) as error:
        if not any("\ud800" <= letter <= "\udfff" for letter in text):
            raise
        raise DataError("a text has half of a surrogate pair (\\ud800 to \\udfff), which is no character") from error


def tokens_of(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return list(encoded(text, tokenizer)["input_ids"])


def plain_tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokenize the beginning of a sequence: with what the tokenizer adds before it (BOS), not what it adds after it.

    A text that begins with BOS gets no second one.
    """
    ids = tokens_of(text, tokenizer)
    if tokenizer.bos_token is not None and text.startswith(str(tokenizer.bos_token)):
        return ids
    whole = list(tokenizer(text)["input_ids"])
    if not ids:
        return [token for token in whole if token == tokenizer.bos_token_id]
    start = next((i for i in range(len(whole)) if whole[i : i + len(ids)] == ids), 0)
    return whole[:start] + ids


def turn_end(tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> int | None:
    """Return the special token with which the chat template ends a turn of the model; None if there is none."""
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = render_chat(chat, tokenizer, data)
    except DataError:  # there is no template, or it needs something else
        return None
    special = special_tokens(tokenizer)
    return next((token for token in tokens_of(text.partition(_ANSWER)[2], tokenizer) if token in special), None)


def response_text(token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, *, stopped: bool) -> str:
    """Decode a response exactly, with the special tokens in it, such as <think>.

    stopped: it ends with a stop token, which the text does not contain.
    """
    return str(tokenizer.decode(list(token_ids[:-1] if stopped else token_ids)))
