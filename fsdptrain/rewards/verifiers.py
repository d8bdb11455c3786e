"""Built-in rewards: (prompt, response text) -> reward, usually 0 or 1, or None if it cannot be scored.

To add a reward, write a function and register it in `REWARDS`.
"""

import re
import threading
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from fsdptrain.algo.correct import is_correct
from fsdptrain.errors import RewardError
from fsdptrain.protocols import RewardFunction
from fsdptrain.rewards.answers import extract_answer, find_answer
from fsdptrain.types import Prompt

MATH_TIMEOUT = 5  # [s] per parse and per comparison
TAGGED = re.compile(r"\s*<think>(?P<think>.*?)</think>\s*<answer>(?P<answer>.*?)</answer>\s*", re.DOTALL)
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def reasoning_gym(prompt: Prompt, response: str) -> float:
    """Score the extracted answer with the task's scorer. Some tasks give partial credit.

    A few scorers (prime_factorization, boxnet) raise for an answer that they cannot parse. Such an answer is incorrect
    rather than unscored; otherwise a model that writes nonsense would stop the run.
    """
    task, entry = prompt.metadata["task"], prompt.metadata["entry"]
    try:
        return float(_scorer(task)(extract_answer(response), entry))
    except (ValueError, TypeError, LookupError, ArithmeticError):
        return 0.0


def reasoning_gym_strict(prompt: Prompt, response: str) -> float:
    """1 for full marks of the task's scorer, else 0. Partial credit, divided by a small std, misleads GRPO."""
    return float(is_correct(reasoning_gym(prompt, response)))


def math(prompt: Prompt, response: str) -> float | None:
    """1 if the answer equals the label mathematically (math-verify), else 0; None if the label is not mathematical.

    If the label contains "####", the answer is the text after it (GSM8K). Use `exact` for answers in words.
    """
    from math_verify import verify  # lazy: importing sympy is slow

    text = "" if prompt.label is None else str(prompt.label).rpartition("####")[2].strip()
    label = _parse_math(text, marked=True)
    if not label:
        return None
    answer = find_answer(response)
    parsed = _parse_math(response, marked=False) if answer is None else _parse_math(answer, marked=True)
    return float(verify(label, parsed, timeout_seconds=_math_timeout()))


def exact(prompt: Prompt, response: str) -> float | None:
    """1 if the answer equals the label exactly, ignoring surrounding whitespace, else 0."""
    return None if prompt.label is None else float(extract_answer(response) == str(prompt.label).strip())


def format_tags(prompt: Prompt, response: str) -> float:
    """1 if the response is <think>...</think><answer>...</answer> and nothing else, each tag once, else 0.

    The chat template may already open <think> at the end of the prompt. Tags must not be special tokens of the
    tokenizer, which are removed from the text.
    """
    if prompt.text.rstrip().endswith("<think>"):
        response = "<think>" + response
    return float(all(response.count(tag) == 1 for tag in TAGS) and TAGGED.fullmatch(response) is not None)


def environment(prompt: Prompt, response: str) -> Mapping[str, float]:
    """Return the environment's reward of the episode. Raises RewardError if it gave none.

    An environment may leave scoring to other rewards.
    """
    del response  # the environment has already seen every response
    reward = prompt.metadata["episode"].reward
    if reward is None:
        raise RewardError("the environment gave no reward in this episode: score the last response by another --reward")
    return reward


REWARDS: Mapping[str, RewardFunction] = {
    "environment": environment,
    "reasoning_gym": reasoning_gym,
    "reasoning_gym_strict": reasoning_gym_strict,
    "math": math,
    "exact": exact,
    "format": format_tags,
}


@lru_cache
def _scorer(task: str) -> Callable[[str, Mapping[str, Any]], float]:
    from reasoning_gym import get_score_answer_fn

    return get_score_answer_fn(task)  # type: ignore[return-value]  # its annotation leaves out the arguments


def _parse_math(text: str, *, marked: bool) -> list[Any]:
    """Parse `text` with math-verify. `marked`: the whole text is the answer, so no search is needed."""
    from math_verify import parse

    if marked and "$" not in text and "\\boxed" not in text:
        text = f"\\boxed{{{text}}}"
    return parse(text, parsing_timeout=_math_timeout())  # type: ignore[arg-type]  # None is documented


def _math_timeout() -> int | None:
    """Return the time limit of math-verify, or None outside the main thread: it uses a signal."""
    return MATH_TIMEOUT if threading.current_thread() is threading.main_thread() else None
