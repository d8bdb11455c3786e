"""A limit for calls of a reward on the main thread."""

import signal
import threading
import time
from typing import Any

from fsdptrain.errors import RolloutError
from fsdptrain.protocols import RewardFunction, TimedReward
from fsdptrain.types import Prompt

_INTERRUPT = signal.SIGVTALRM  # hardly used otherwise; SIGALRM is for the reward itself


class MainThreadLimit:
    """A reward function whose calls must be made on the main thread. One that takes `limit_s` ends the rollout.

    The call stays on the main thread, where it may stop itself by SIGALRM, as `math` does. Another thread interrupts it
    by a signal. A reward that catches RolloutError, or computes in C without end, is not interrupted.
    """

    def __init__(self, reward: RewardFunction, limit_s: float) -> None:
        self._reward = reward
        self._limit_s = limit_s
        self._started: float | None = None  # of the current call [s, monotonic]

    def begin_rollout(self) -> None:
        if isinstance(self._reward, TimedReward):
            self._reward.begin_rollout()

    def __call__(self, prompt: Prompt, response: str) -> Any:
        """Return or raise what `reward` returns or raises. Raises RolloutError after `limit_s`."""
        if threading.current_thread() is not threading.main_thread():  # `Trainer.fit` in a thread of the user
            return self._reward(prompt, response)
        signal.signal(_INTERRUPT, self._interrupt)
        timer = threading.Timer(self._limit_s, signal.pthread_kill, (threading.get_ident(), _INTERRUPT))
        timer.daemon = True
        self._started = time.monotonic()
        timer.start()
        try:
            return self._reward(prompt, response)
        finally:
            self._started = None
            timer.cancel()

    def _interrupt(self, *_: object) -> None:
        if self._started is None or time.monotonic() - self._started < self._limit_s:
            return  # the signal is of a call that has just ended
        raise RolloutError(
            f"--reward did not answer within {self._limit_s:g} s, half of --dist-timeout: give it its own time limit, "
            "or set --reward-timeout, which leaves such samples unscored"
        )
