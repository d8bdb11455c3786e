"""Rewards for the tests of the command line."""

from fsdptrain.types import Prompt


def raises(prompt: Prompt, response: str) -> float:
    return 1 / 0


def variety(prompt: Prompt, response: str) -> float:
    """Differs between the answers of a random model, so that there is a gradient."""
    return len(set(response)) / 8
