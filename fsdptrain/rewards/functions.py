"""Rewards without a package of their own: exact match, format, and the reward of the environment."""

import re
from collections.abc import Mapping

from fsdptrain.errors import RewardError
from fsdptrain.rewards.answers import extract_answer
from fsdptrain.types import Prompt

TAGGED = re.compile(r"\s*<think>(?P<think>.*?)</think>\s*<answer>(?P<answer>.*?)</answer>\s*", re.DOTALL)
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


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
