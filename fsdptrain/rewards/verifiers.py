"""The rewards that come with fsdptrain. Each is (prompt, response text) -> reward, usually 0 or 1; None: cannot be
scored.

To add one: write a function, and give it a line in `REWARDS`.
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

MATH_TIMEOUT = 5  # for each parse and each comparison [s]
TAGGED = re.compile(r"\s*<think>(?P<think>.*?)</think>\s*<answer>(?P<answer>.*?)</answer>\s*", re.DOTALL)
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def reasoning_gym(prompt: Prompt, response: str) -> float:
    """The task's own scorer on the extracted answer; some tasks give partial credit.

    A few scorers (prime_factorization, boxnet) raise at an answer that they cannot read: such an answer is wrong. It is
    not unscored, or a model that writes nonsense would stop the run.
    """
    task, entry = prompt.metadata["task"], prompt.metadata["entry"]
    try:
        return float(_scorer(task)(extract_answer(response), entry))
    except (ValueError, TypeError, LookupError, ArithmeticError):
        return 0.0


def reasoning_gym_strict(prompt: Prompt, response: str) -> float:
    """1 where the task's own scorer gives full marks, else 0: partial credit, divided by a small std, misleads GRPO."""
    return float(is_correct(reasoning_gym(prompt, response)))


def math(prompt: Prompt, response: str) -> float | None:
    """1 if the answer equals the label as mathematics (math-verify), else 0; None if the label is no mathematics.

    What stands behind "####" in a label is the answer (GSM8K). Use `exact` where answers are words.
    """
    from math_verify import verify  # sympy takes a while: only where it is asked for

    text = "" if prompt.label is None else str(prompt.label).rpartition("####")[2].strip()
    label = _parse_math(text, marked=True)
    if not label:
        return None
    answer = find_answer(response)
    parsed = _parse_math(response, marked=False) if answer is None else _parse_math(answer, marked=True)
    return float(verify(label, parsed, timeout_seconds=_math_timeout()))


def exact(prompt: Prompt, response: str) -> float | None:
    """1 if the answer is the label, character by character but for blanks around it, else 0."""
    return None if prompt.label is None else float(extract_answer(response) == str(prompt.label).strip())


def format_tags(prompt: Prompt, response: str) -> float:
    """1 if the response is <think>...</think><answer>...</answer> and nothing else, each tag once, else 0.

    A chat template may have opened <think> at the end of the prompt already. Tags must not be special tokens of the
    tokenizer: those are left out of the text.
    """
    if prompt.text.rstrip().endswith("<think>"):
        response = "<think>" + response
    return float(all(response.count(tag) == 1 for tag in TAGS) and TAGGED.fullmatch(response) is not None)


def environment(prompt: Prompt, response: str) -> Mapping[str, float]:
    """What `--environment` gave in the course of the episode. RewardError if it gave nothing at all: it may be one that
    leaves the judging to others.
    """
    del response  # it has seen all of them
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
    """What math-verify makes of `text`; `marked`: all of it is the answer, so that it need not be searched for."""
    from math_verify import parse

    if marked and "$" not in text and "\\boxed" not in text:
        text = f"\\boxed{{{text}}}"
    return parse(text, parsing_timeout=_math_timeout())  # type: ignore[arg-type]  # None is documented


def _math_timeout() -> int | None:
    """math-verify's time limit is a signal, which only the main thread can take: elsewhere there is none."""
    return MATH_TIMEOUT if threading.current_thread() is threading.main_thread() else None
