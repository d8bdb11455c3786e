"""Environments of a user, named by import path."""

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


class RowsNotInAMethod(Countdown):
    dataset = ({"prompt": "?"},)


class WithoutStep:
    def reset(self, prompt: Prompt, seed: int) -> None: ...


thing = 3
