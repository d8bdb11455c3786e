"""Deadlines for calls of a reward function: per call, and for all hung calls of a rollout."""

import threading
from functools import partial
from typing import Any

from fsdptrain.errors import RewardError, RolloutError
from fsdptrain.protocols import RewardFunction
from fsdptrain.trainer.samples.main_thread import MainThreadLimit
from fsdptrain.trainer.samples.threads import DeadlineError, StepThreads
from fsdptrain.types import Prompt

IN_FLIGHT_S = 300.0  # upper limit if --reward-timeout is not set
_MOST_MISSED = 3  # consecutive misses that raise RolloutError: the cause is then not a single response


class WithDeadline:
    """A reward function with a deadline. A sample whose call misses the deadline is not scored.

    Without a timeout, calls on the main thread have the limit of `MainThreadLimit` only.

    Args:
        patience: total time that hung calls may take in one rollout, because other ranks wait for this rank. [s]
    """

    def __init__(self, reward: RewardFunction, timeout: float | None, *, patience: float) -> None:
        self._reward = reward
        self._on_main_thread = MainThreadLimit(reward, patience)
        self._always = timeout is not None
        self._patience = patience
        of_call = timeout or min(IN_FLIGHT_S, patience / _MOST_MISSED)
        self._threads = StepThreads(num_threads=1, timeout=of_call, flag="--reward")
        self._in_a_row = 0  # missed deadlines
        self._in_rollout = 0

    def begin_rollout(self) -> None:
        self._in_rollout = 0

    def __call__(self, prompt: Prompt, response: str) -> Any:
        """Return or raise what `reward` returns or raises.

        Raises RewardError if the call misses its deadline. Raises RolloutError after several consecutive misses, or if
        the misses of one rollout would keep other ranks waiting too long.
        """
        if not self._always and threading.current_thread() is threading.main_thread():
            return self._on_main_thread(prompt, response)
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
                f"prompt {prompt.id!r}: give it its own time limit, or raise --reward-timeout"
            )
        if (self._in_rollout + 1) * timeout > self._patience:
            raise RolloutError(
                f"--reward did not answer {self._in_rollout} times in one rollout within {timeout:g} s, last to prompt "
                f"{prompt.id!r}, and other ranks wait no longer than {self._patience:g} s for that: give it its own "
                "time limit, lower --reward-timeout, or raise --dist-timeout"
            )
