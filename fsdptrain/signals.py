"""SIGINT and SIGTERM as requests: the first one asks for an orderly end, a later one for an immediate end."""

import signal
import threading
import time
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

SAME_REQUEST_S = 1.0  # [s] within which signals count as one: terminals and `timeout` signal several processes


class StopSignals:
    """Handlers of SIGINT and SIGTERM. Subclasses say what the first and a later signal do.

    Python runs handlers in the main thread, between bytecodes: not while a call in C waits.
    """

    def __init__(self, *, grace_period: float) -> None:
        self.signal: int | None = None  # the first one
        self._grace_period = grace_period  # [s] after SIGTERM
        self._is_over = False
        self._since = 0.0
        self._timer: threading.Timer | None = None
        self._before: Mapping[int, Any] = {}

    def first(self, number: int) -> None:
        """Called by the first signal."""
        raise NotImplementedError

    def again(self, number: int) -> None:
        """Called by a signal that comes more than SAME_REQUEST_S after the first, or after the grace period."""
        raise NotImplementedError

    def overdue(self) -> None:
        """Called in a thread when the grace period has passed."""
        raise NotImplementedError

    def install(self, numbers: Iterable[int]) -> None:
        """Handle these signals until `restore`."""
        self.signal, self._is_over = None, False
        self._before = {number: signal.signal(number, self._handle) for number in numbers}

    def restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
        if self._timer is not None:
            self._timer.cancel()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.signal is None:
            self.signal, self._since = number, time.monotonic()
            self.first(number)
            if number == signal.SIGTERM:
                self._timer = threading.Timer(self._grace_period, self._end)
                self._timer.daemon = True
                self._timer.start()
        elif self._is_over or time.monotonic() - self._since > SAME_REQUEST_S:
            self.again(number)

    def _end(self) -> None:
        self._is_over = True
        self.overdue()


def heeded(numbers: Iterable[int]) -> list[int]:
    """Return those of the signals that this process does not ignore."""
    return [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
