"""Extraction of final answers from responses."""

from typing import Any

from fsdptrain.types import Prompt

OPEN, CLOSE = "<answer>", "</answer>"
THINK, THOUGHT = "<think>", "</think>"
BOXED = "\\boxed{"


def labels_of(prompt: Prompt) -> list[Any]:
    """Return the labels of a prompt, one of which an answer must equal. A row without a label has none."""
    labels = prompt.label if isinstance(prompt.label, list | tuple) else [prompt.label]
    return [label for label in labels if label is not None and label != ""]


def spoken(prompt: Prompt, response: str) -> str:
    """Return the response after its last thought, up to one that does not end. The prompt may open the first thought.

    All rewards look for the answer in this text.
    """
    opened = prompt.text.rstrip().endswith(THINK)
    _, ended, rest = response.rpartition(THOUGHT)
    return "" if opened and not ended else rest.partition(THINK)[0]


def extract_answer(text: str) -> str:
    """Return the last <answer>...</answer> of `spoken` text, else the last \\boxed{...}, else all of it, stripped."""
    found = find_answer(text)
    return text.strip() if found is None else found


def find_answer(text: str) -> str | None:
    """Extract the answer like `extract_answer`, but return None if none is marked. Unclosed marks do not count."""
    close = text.rfind(CLOSE)
    start = text.rfind(OPEN, 0, close) if close >= 0 else -1
    if start >= 0:
        return text[start + len(OPEN) : close].strip()
    return _last_boxed(text)


def _last_boxed(text: str) -> str | None:
    start = text.rfind(BOXED)
    while start >= 0:
        content = _up_to_closing_brace(text, start + len(BOXED))
        if content is not None:
            return content.strip()
        start = text.rfind(BOXED, 0, start)
    return None


def _up_to_closing_brace(text: str, start: int) -> str | None:
    depth, at = 1, start
    while at < len(text):
        if text[at] == "\\":
            at += 1  # an escaped brace is part of the answer
        elif text[at] == "{":
            depth += 1
        elif text[at] == "}":
            depth -= 1
            if depth == 0:
                return text[start:at]
        at += 1
    return None
