"""An OpenEnv server that counts the letters of two actions. Some seeds make it fail."""
# pyright: reportMissingImports=false

import os
import time
from typing import Any

from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class LettersAction(Action):
    text: str


class LettersObservation(Observation):
    echo: str


class Letters(Environment[LettersAction, LettersObservation, State]):
    """Say something, twice."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._seed, self._turns = 0, 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> LettersObservation:
        self._seed, self._turns = seed or 0, 0
        return LettersObservation(echo=f"game {seed}")

    def step(self, action: LettersAction, timeout_s: float | None = None, **kwargs: Any) -> LettersObservation:
        match self._seed:
            case 5:
                raise ValueError("no such\nword")
            case 6:
                os._exit(3)
            case 7:
                time.sleep(4)
        self._turns += 1
        return LettersObservation(echo="more", reward=0.5 * len(action.text), done=self._turns == 2)

    @property
    def state(self) -> State:
        return State(step_count=self._turns)


app = create_fastapi_app(Letters, LettersAction, LettersObservation, max_concurrent_envs=2)
