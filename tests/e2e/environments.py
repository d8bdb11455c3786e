"""Environments for the tests of the command line."""

from fsdptrain.types import Prompt, Turn


class Broken:
    def reset(self, prompt: Prompt, seed: int) -> None: ...

    def step(self, state: None, response: str) -> Turn:
        return 1 / 0
