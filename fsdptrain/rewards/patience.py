"""The time that other ranks wait for rewards that hang."""

import time
from collections.abc import Sequence

from fsdptrain.errors import RolloutError
from fsdptrain.rewards.calls import Call


class Patience:
    """Time of one rollout that late calls, crashes and restarts have taken: the larger of two sums.

    One is the time that ended with one of them in place of an answer. The other is the sum of their shares: of a call
    in one of eight processes, an eighth of its time, also while the others answer.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit  # of one rollout, for all rewards [s]
        self.begin()

    def begin(self) -> None:
        """Begin a rollout."""
        self._gaps = self._shares = 0.0
        self._times, self._last = 0, "a process that was idle had ended"
        self.answered()

    @property
    def lost(self) -> float:
        return max(self._gaps, self._shares)

    def answered(self) -> None:
        self._since = time.monotonic()

    def record(self, calls: Sequence[Call], scored: object, reason: str, share: float) -> None:
        """Count one call, which was not answered if `scored` is None. `reason` and `share` as in `lose`."""
        if scored is None:
            self.lose(f"{reason} (prompt {calls[0][0].id!r})", share)
        else:
            self.answered()

    def lose(self, reason: str, share: float) -> None:
        """Count a late call, a crash or a restart. Raises RolloutError if the rollout has lost too much.

        reason: why a call has no answer; empty for a restart
        share: its time, divided by the number of calls that may run at a time [s]
        """
        now = time.monotonic()
        self._gaps, self._since = self._gaps + now - self._since, now
        self._shares += share
        self._times, self._last = self._times + 1, reason or self._last
        if self.lost >= self.limit:
            raise RolloutError(
                f"--reward: {self._times} late calls, crashes and restarts in one rollout took {self.lost:.0f} s, and "
                f"other ranks wait no longer than {self.limit:g} s for that; last: {self._last}; give it its own "
                "time limit, lower --reward-timeout, or raise --dist-timeout"
            )
