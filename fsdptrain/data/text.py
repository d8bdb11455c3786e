"""Text to tokens and tokens to text outside of a chat template."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    added = tokenizer.added_tokens_decoder
    return frozenset(tokenizer.all_special_ids) | {id_ for id_, token in added.items() if token.special}


def plain_tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokenize the beginning of a sequence: with what the tokenizer adds before it (BOS), not what it adds after it.

    A text that begins with BOS gets no second one.
    """
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if tokenizer.bos_token is not None and text.startswith(str(tokenizer.bos_token)):
        return ids
    whole = list(tokenizer(text)["input_ids"])
    if not ids:
        return [token for token in whole if token == tokenizer.bos_token_id]
    start = next((i for i in range(len(whole)) if whole[i : i + len(ids)] == ids), 0)
    return whole[:start] + ids


def response_text(token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, *, stopped: bool) -> str:
    """Decode a response exactly, with the special tokens in it, such as <think>.

    stopped: it ends with a stop token, which the text does not contain.
    """
    return str(tokenizer.decode(list(token_ids[:-1] if stopped else token_ids)))
