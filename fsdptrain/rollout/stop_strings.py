"""Stop strings: texts that end a response. It keeps the token that completes one, and no token after it."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fsdptrain.data.text import response_text
from fsdptrain.types import Completion, FinishReason

_CHUNK = 64  # tokens that are decoded together
_INCOMPLETE = "\ufffd"  # what a part of a character is decoded to


class StopReader:
    """Reads the tokens of one response, in parts, until their text contains a stop string.

    A token may end within a character, and its text may depend on the token before it."""

    def __init__(self, strings: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
        self._strings = strings
        self._decode = partial(response_text, tokenizer=tokenizer, stopped=False)
        self._tail_length = max(map(len, strings)) - 1
        self._tail = ""  # end of the text that is complete
        self._ids: list[int] = []  # tokens to decode with the next ones
        self._num_complete = self._num_shown = 0  # those in the complete text, and their characters

    def read(self, token_ids: Sequence[int]) -> int | None:
        """Return how many of the next tokens end with the one that completes a stop string; None: none does."""
        text = self._text(token_ids)
        if self._stops(text) or _INCOMPLETE in text:  # a part of a character may hide the characters before it
            for count in range(1, len(token_ids) + 1):
                if self._stops(self._text(token_ids[:count])):
                    return count
        self._ids += token_ids
        if len(text) > len(self._tail) and not text.endswith(_INCOMPLETE):
            self._tail = text[max(0, len(text) - self._tail_length) :]
            del self._ids[: self._num_complete]
            self._num_complete, self._num_shown = len(self._ids), len(self._decode(self._ids))
        return None

    def _stops(self, text: str) -> bool:
        return any(string in text for string in self._strings)

    def _text(self, token_ids: Sequence[int]) -> str:
        return self._tail + self._decode([*self._ids, *token_ids])[self._num_shown :]


class RowStops:
    """The stop strings of the rows of a decode loop."""

    def __init__(self, strings: Sequence[str], tokenizer: PreTrainedTokenizerBase, num_rows: int) -> None:
        self._readers = [StopReader(strings, tokenizer) for _ in range(num_rows)]
        self.ends: list[int | None] = [None] * num_rows  # tokens of each row up to its stop string
        self.num_read = 0  # tokens of each row

    def ended(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Read the next tokens [A, N] of `rows` [A]. Returns whether each has a stop string [A]. Waits for them."""
        for row, ids in zip(rows.tolist(), tokens.tolist(), strict=True):
            if self.ends[row] is None and (count := self._readers[row].read(ids)) is not None:
                self.ends[row] = self.num_read + count
        self.num_read += tokens.shape[1]
        return torch.tensor([self.ends[row] is not None for row in rows.tolist()], device=rows.device)


def stop_end(token_ids: Sequence[int], strings: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the number of tokens up to the one that completes one of `strings`; None: none does."""
    reader = StopReader(strings, tokenizer)
    for start in range(0, len(token_ids), _CHUNK):
        if (count := reader.read(token_ids[start : start + _CHUNK])) is not None:
            return start + count
    return None


def cut_at_stop(completion: Completion, strings: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Completion:
    """Cut a completion after the token that completes one of `strings`. An engine may have stopped later, or not."""
    end = stop_end(completion.token_ids, strings, tokenizer)
    return completion if end is None else cut(completion, end, "stop")


def cut(completion: Completion, count: int, reason: FinishReason) -> Completion:
    """Keep the first `count` tokens."""
    versions, routes = completion.versions, completion.routes
    return replace(
        completion,
        token_ids=completion.token_ids[:count],
        logprobs=completion.logprobs[:count],
        finish_reason=reason,
        versions=None if versions is None else versions[:count],
        routes=None if routes is None else routes[: len(routes) - len(completion.token_ids) + count],
    )
