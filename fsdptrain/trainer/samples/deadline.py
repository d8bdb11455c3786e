"""A deadline for each call of a reward function, which is foreign code and may hang, and for all that hang."""

import threading
from functools import partial
from typing import Any

from fsdptrain.environments import DeadlineError, StepThreads
from fsdptrain.errors import RewardError, RolloutError
from fsdptrain.protocols import RewardFunction
from fsdptrain.types import Prompt

IN_FLIGHT_S = 300.0  # at most, where --reward-timeout says nothing
_MOST_MISSED = 3  # in a row: then it is not one answer that is at fault


class WithDeadline:
    """`reward`, whose sample is not scored where it misses the deadline. Without a timeout only a call by another
    thread than the main one has a deadline: the main one may stop a call by a signal, as `math` does.

    Args:
        patience: what the calls of one rollout that hang may take together, for other ranks wait for this one. [s]
    """

    def __init__(self, reward: RewardFunction, timeout: float | None, *, patience: float) -> None:
        self._reward = reward
        self._always = timeout is not None
        self._patience = patience
        of_call = timeout or min(IN_FLIGHT_S, patience / _MOST_MISSED)
        self._threads = StepThreads(num_threads=1, timeout=of_call, flag="--reward")
        self._in_a_row = 0  # calls that missed it
        self._in_rollout = 0

    def begin_rollout(self) -> None:
        self._in_rollout = 0

    def __call__(self, prompt: Prompt, response: str) -> Any:
        """What `reward` returns or raises. RewardError where it does not end; RolloutError when that happened several
        times in a row, or so often in one rollout that other ranks would wait too long."""
        if not self._always and threading.current_thread() is threading.main_thread():
            return self._reward(prompt, response)
        [found] = self._threads.run([partial(self._reward, prompt, response)])
        if isinstance(found, DeadlineError):
            self._miss(prompt)
            raise RewardError(f"--reward: {found}")
        self._in_a_row = 0
        if isinstance(found, Exception):
            raise found
        return found

    def _miss(self, prompt: Prompt) -> None:
        self._in_a_row += 1
        self._in_rollout += 1
        timeout = self._threads.timeout
        if self._in_a_row == _MOST_MISSED:
            raise RolloutError(
                f"--reward did not answer {_MOST_MISSED} times in a row within {timeout:g} s, last to "
                f"prompt {prompt.id!r}: give it a time limit of its own, or raise --reward-timeout"
            )
        if (self._in_rollout + 1) * timeout > self._patience:
            raise RolloutError(
                f"--reward did not answer {self._in_rollout} times in one rollout within {timeout:g} s, last to prompt "
                f"{prompt.id!r}, and other ranks wait no longer than {self._patience:g} s for that: give it a time "
                "limit of its own, lower --reward-timeout, or raise --dist-timeout"
            )
