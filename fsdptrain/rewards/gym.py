"""Rewards of reasoning-gym: the scorer of the task that generated the prompt."""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from fsdptrain.rewards.answers import extract_answer, spoken
from fsdptrain.rewards.values import is_correct
from fsdptrain.types import Prompt


def reasoning_gym(prompt: Prompt, response: str) -> float:
    """Score the extracted answer with the task's scorer. Some tasks give partial credit.

    A few scorers (prime_factorization, boxnet) raise for an answer that they cannot parse. Such an answer is incorrect
    rather than unscored; otherwise a model that writes nonsense would stop the run.
    """
    task, entry = prompt.metadata["task"], prompt.metadata["entry"]
    try:
        return float(_task_reward(task)(extract_answer(spoken(prompt, response)), entry))
    except (ValueError, TypeError, LookupError, ArithmeticError):
        return 0.0


def reasoning_gym_strict(prompt: Prompt, response: str) -> float:
    """1 for full marks of the task's scorer, else 0. Partial credit, divided by a small std, misleads GRPO."""
    return float(is_correct(reasoning_gym(prompt, response)))


@lru_cache
def _task_reward(task: str) -> Callable[[str, Mapping[str, Any]], float]:
    from reasoning_gym import get_score_answer_fn

    return get_score_answer_fn(task)  # type: ignore[return-value]  # its annotation leaves out the arguments
