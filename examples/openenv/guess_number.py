"""The game of examples/guess_number/game.py as a server of OpenEnv 0.10. play.py shows how to start it."""
# pyright: reportMissingImports=false

from random import Random
from typing import Any

from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from openenv.core.env_server.types import EnvironmentMetadata

HIGHEST = 100


class Guess(Action):
    guess: int


class Hint(Observation):
    hint: str


class GuessNumber(Environment[Guess, Hint, State]):
    """The model guesses a number and gets `higher` or `lower` until it is right."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def get_metadata(self) -> EnvironmentMetadata:
        return EnvironmentMetadata(name="guess_number", description=f"I think of a number from 1 to {HIGHEST}.")

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Hint:
        self._number = Random(seed).randint(1, HIGHEST)
        return Hint(hint="Guess it.")

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Hint:
        if action.guess == self._number:
            return Hint(hint="Right.", reward=1.0, done=True)
        return Hint(hint="higher" if action.guess < self._number else "lower", reward=0.0)

    @property
    def state(self) -> State:
        return State()


app = create_fastapi_app(GuessNumber, Guess, Hint, max_concurrent_envs=64)
