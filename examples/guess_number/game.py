"""A custom environment: a class with `reset` and `step`.

    fsdptrain --hf-checkpoint Qwen/Qwen3-0.6B --environment examples.guess_number.game:GuessNumber \\
              --prompt-data environment --max-turns 8 --rollout-max-response-len 512

Set the arguments of the class with `--environment-kwargs highest=1000`. For optional members, see docs/environments.md.
"""

from collections.abc import Mapping, Sequence
from random import Random

from fsdptrain.types import Prompt, Turn


class GuessNumber:
    """The model guesses a number and gets `higher` or `lower` until it is right."""

    def __init__(self, highest: int = 100) -> None:
        self.highest = highest
        self.rules = f"I think of a number from 1 to {highest}. Guess it, and answer with a number and nothing else."

    def dataset(self) -> Sequence[Mapping[str, object]]:
        return [{"prompt": f"Game {i}. {self.rules}"} for i in range(1000)]

    def reset(self, prompt: Prompt, seed: int) -> int:
        return Random(seed).randint(1, self.highest)

    def step(self, state: int, response: str) -> Turn:
        try:
            guess = int(response)
        except ValueError:
            return Turn(done=True, reward=0.0)
        if guess == state:
            return Turn(done=True, reward=1.0)
        return Turn("higher" if guess < state else "lower", reward=0.0)
