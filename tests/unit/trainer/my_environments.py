"""Environments of a user, named by import path."""

from collections.abc import Sequence

from fsdptrain.types import Prompt, Turn


class Countdown:
    """Wants `turns` answers."""

    def __init__(self, turns: int = 3) -> None:
        self.turns = turns

    def reset(self, prompt: Prompt, seed: int) -> list[str]:
        return []

    def step(self, state: list[str], response: str) -> Turn:
        state.append(response)
        left = self.turns - len(state)
        return Turn(f"{left} more", done=left == 0, reward=1.0)


def echo(prompt: Prompt, responses: Sequence[str], turns: int = 2) -> Turn:
    return Turn(f"you said {responses[-1]}", done=len(responses) == turns, reward=float(len(responses)))


class RowsNotInAMethod(Countdown):
    dataset = ({"prompt": "?"},)


class WithoutStep:
    def reset(self, prompt: Prompt, seed: int) -> None: ...


thing = 3
