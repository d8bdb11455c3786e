"""Mathematical equality of answer and label, by math-verify."""

import threading
from typing import Any

from fsdptrain.rewards.answers import find_answer, labels_of, spoken
from fsdptrain.types import Prompt

MATH_TIMEOUT = 5  # [s] per parse and per comparison


def math(prompt: Prompt, response: str) -> float | None:
    """1 if the answer equals the label, or one of a list of labels, mathematically (math-verify), else 0.

    None if no label is mathematical. If a label contains "####", the answer is the text after it (GSM8K). Use `exact`
    for answers in words.
    """
    from math_verify import verify  # lazy: importing sympy is slow

    texts = [str(label).rpartition("####")[2].strip() for label in labels_of(prompt)]
    labels = [label for text in texts if (label := _parse_math(text, marked=True))]
    if not labels:
        return None
    text = spoken(prompt, response)
    answer = find_answer(text)
    parsed = _parse_math(text, marked=False) if answer is None else _parse_math(answer, marked=True)
    return float(any(verify(label, parsed, timeout_seconds=_math_timeout()) for label in labels))


def _parse_math(text: str, *, marked: bool) -> list[Any]:
    """Parse `text` with math-verify. `marked`: the whole text is the answer, so no search is needed."""
    from math_verify import parse

    if marked and "$" not in text and "\\boxed" not in text:
        text = f"\\boxed{{{text}}}"
    return parse(text, parsing_timeout=_math_timeout())  # type: ignore[arg-type]  # None is documented


def _math_timeout() -> int | None:
    """Return the time limit of math-verify, or None outside the main thread: it uses a signal."""
    return MATH_TIMEOUT if threading.current_thread() is threading.main_thread() else None
