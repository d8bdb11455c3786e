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


class Asking:
    """An agent that holds something open."""

    def __init__(self, rows: int) -> None:
        self.rows, self.closed = rows, False

    async def __call__(self, client, prompt: Prompt) -> float:
        return float(self.rows)

    def dataset(self) -> list[dict[str, str]]:
        return [{"prompt": str(row)} for row in range(self.rows)]

    def close(self) -> None:
        self.closed = True
