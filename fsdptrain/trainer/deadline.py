"""A deadline for each call of a reward function, which is foreign code and may hang."""

import threading
from functools import partial
from typing import Any

from fsdptrain.environments import DeadlineError, StepThreads
from fsdptrain.errors import RewardError, RolloutError
from fsdptrain.protocols import RewardFunction
from fsdptrain.types import Prompt

IN_FLIGHT_S = 300.0  # where --reward-timeout says nothing
_MOST_MISSED = 3  # in a row: then it is not one answer that is at fault


class WithDeadline:
    """`reward`, whose sample is not scored where it misses the deadline. Without a timeout only a call by another
    thread than the main one has a deadline: the main one may stop a call by a signal, as `math` does.
    """

    def __init__(self, reward: RewardFunction, timeout: float | None) -> None:
        self._reward = reward
        self._always = timeout is not None
        self._threads = StepThreads(num_threads=1, timeout=timeout or IN_FLIGHT_S, flag="--reward")
        self._num_missed = 0  # in a row

    def __call__(self, prompt: Prompt, response: str) -> Any:
        """What `reward` returns or raises. RewardError where it does not end; RolloutError when that happened several
        times in a row."""
        if not self._always and threading.current_thread() is threading.main_thread():
            return self._reward(prompt, response)
        [found] = self._threads.run([partial(self._reward, prompt, response)])
        self._num_missed = self._num_missed + 1 if isinstance(found, DeadlineError) else 0
        if self._num_missed == _MOST_MISSED:
            raise RolloutError(
                f"--reward did not answer {_MOST_MISSED} times in a row within {self._threads.timeout:g} s, last to "
                f"prompt {prompt.id!r}: give it a time limit of its own, or raise --reward-timeout"
            )
        if isinstance(found, DeadlineError):
            raise RewardError(f"--reward: {found}")
        if isinstance(found, Exception):
            raise found
        return found
