"""A limit for calls of a reward on the main thread."""

import signal
import threading
import time
from typing import Any

from fsdptrain.errors import RolloutError
from fsdptrain.protocols import RewardFunction, TimedReward
from fsdptrain.types import Prompt

_INTERRUPT = signal.SIGVTALRM  # hardly used otherwise; SIGALRM is for the reward itself
_CHECKS = 20  # of the limit within its time


class MainThreadLimit:
    """A reward function whose calls must be made on the main thread. One that takes `limit_s` ends the rollout.

    The call stays on the main thread, where it may stop itself by SIGALRM, as `math` does. Another thread, one for all
    calls, interrupts it by a signal, up to 5 % too late. A reward that catches RolloutError, or computes in C without
    end, is not interrupted.
    """

    def __init__(self, reward: RewardFunction, limit_s: float) -> None:
        self._reward = reward
        self._limit_s = limit_s
        self._started: float | None = None  # of the current call [s, monotonic]
        self._watching = False

    def begin_rollout(self) -> None:
        if isinstance(self._reward, TimedReward):
            self._reward.begin_rollout()

    def __call__(self, prompt: Prompt, response: str) -> Any:
        """Return or raise what `reward` returns or raises. Raises RolloutError after `limit_s`."""
        if threading.current_thread() is not threading.main_thread():  # `Trainer.fit` in a thread of the user
            return self._reward(prompt, response)
        if not self._watching:
            self._watching = True
            threading.Thread(target=self._watch, args=(threading.get_ident(),), daemon=True).start()
        signal.signal(_INTERRUPT, self._interrupt)
        self._started = time.monotonic()
        try:
            return self._reward(prompt, response)
        finally:
            self._started = None

    def _watch(self, main_thread: int) -> None:
        while True:
            time.sleep(self._limit_s / _CHECKS)
            if self._is_late():
                signal.pthread_kill(main_thread, _INTERRUPT)

    def _is_late(self) -> bool:
        started = self._started  # another thread may set it to None
        return started is not None and time.monotonic() - started >= self._limit_s

    def _interrupt(self, *_: object) -> None:
        if not self._is_late():
            return  # the signal is of a call that has just ended
        raise RolloutError(
            f"--reward did not answer within {self._limit_s:g} s, half of --dist-timeout: give it its own time limit, "
            "or set --reward-timeout, which leaves such samples unscored"
        )
