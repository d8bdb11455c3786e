"""The time that other ranks wait for rewards that hang."""

import time
from collections.abc import Sequence

from fsdptrain.errors import RolloutError
from fsdptrain.rewards.calls import Call


class Patience:
    """Real time in one rollout that has ended with a late call, a crash or a restart in place of an answer.

    It does not depend on the number of processes: what happens while another call is answered takes no extra time.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit  # of one rollout, for all rewards [s]
        self.begin()

    def begin(self) -> None:
        """Begin a rollout."""
        self.lost = 0.0
        self._times, self._last = 0, ""
        self.answered()

    def answered(self) -> None:
        self._since = time.monotonic()

    def record(self, calls: Sequence[Call], scored: object, reason: str) -> None:
        """Count one call, which was not answered if `scored` is None."""
        if scored is None:
            self.lose(f"{reason} (prompt {calls[0][0].id!r})")
        else:
            self.answered()

    def lose(self, reason: str = "") -> None:
        """Count the time since the last answer or loss. Raises RolloutError if the rollout has lost too much.

        reason: why a call has no answer; empty for a process that has been restarted
        """
        now = time.monotonic()
        self.lost, self._since = self.lost + now - self._since, now
        if reason:
            self._times, self._last = self._times + 1, reason
        if self.lost >= self.limit:
            raise RolloutError(
                f"--reward did not answer {self._times} times in one rollout, which took {self.lost:.0f} s, and other "
                f"ranks wait no longer than {self.limit:g} s for that; last: {self._last}; give it its own time limit, "
                "lower --reward-timeout, or raise --dist-timeout"
            )
