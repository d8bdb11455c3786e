"""Rewards: exact match, mathematical equality, format, and the reward of the environment."""

import re
import threading
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from fsdptrain.errors import RewardError
from fsdptrain.rewards.answers import extract_answer, find_answer, spoken
from fsdptrain.types import Prompt

TAGGED = re.compile(r"\s*<think>(?P<think>.*?)</think>\s*<answer>(?P<answer>.*?)</answer>\s*", re.DOTALL)
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
MATH_TIMEOUT = 5  # [s] of math-verify, per parse and per comparison


def exact(prompt: Prompt, response: str) -> float | None:
    """1 if the answer equals the label, or one of a list of labels, else 0; None without a label.

    Texts are equal up to surrounding whitespace; a label that is a number, not a text, equals the answer as a number.
    """
    labels = _labels(prompt)
    answer = extract_answer(spoken(prompt, response))
    return float(any(_equal(answer, label) for label in labels)) if labels else None


def _labels(prompt: Prompt) -> list[Any]:
    """Return the labels of a prompt, one of which an answer must equal. A row without a label has none."""
    labels = prompt.label if isinstance(prompt.label, list | tuple) else [prompt.label]
    return [label for label in labels if label is not None and str(label).strip() and label == label]  # NaN is none


def _equal(answer: str, label: Any) -> bool:
    if isinstance(label, bool):  # `true` in JSON is True here
        return answer.lower() == str(label).lower()
    if isinstance(label, int | float | Decimal):
        try:
            return (float if isinstance(label, float) else Decimal)(answer) == label  # a float rounds integers
        except (ValueError, ArithmeticError):
            return False
    return answer == str(label).strip()


def format_tags(prompt: Prompt, response: str) -> float:
    """1 if the response is <think>...</think><answer>...</answer> and nothing else, each tag once, else 0.

    The chat template may have begun the response.
    """
    response = prompt.response_prefix + response
    return float(all(response.count(tag) == 1 for tag in TAGS) and TAGGED.fullmatch(response) is not None)


def none(prompt: Prompt, response: str) -> float:
    """Return 0: a run that learns from a teacher alone needs no reward."""
    del prompt, response
    return 0.0


def environment(prompt: Prompt, response: str) -> Mapping[str, float]:
    """Return the environment's reward of the episode. Raises RewardError if it gave none.

    An environment may leave scoring to other rewards.
    """
    del response  # the environment has already seen every response
    reward = prompt.metadata["episode"].reward
    if reward is None:
        raise RewardError("the environment gave no reward in this episode: score the last response by another --reward")
    return reward


def math(prompt: Prompt, response: str) -> float | None:
    """1 if the answer equals the label, or one of a list of labels, mathematically (math-verify), else 0.

    None if no label is mathematical. If a label contains "####", the answer is the text after it (GSM8K). Use `exact`
    for answers in words.
    """
    from math_verify import verify  # lazy: importing sympy is slow

    texts = [str(label).rpartition("####")[2].strip() for label in _labels(prompt)]
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
