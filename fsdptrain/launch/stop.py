"""Requests to stop a run, passed on from the launcher to its ranks."""

import os
import signal
import threading
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any, Self

import psutil
from torch.distributed.elastic.multiprocessing import SignalException

SAME_REQUEST_S = 1.0  # [s] within which signals count as one: `timeout` sends each to the process and to its group


class ForwardStop:
    """Context manager that passes the first SIGINT or SIGTERM on to the ranks as SIGINT.

    The ranks then stop after the current step. A second signal, or the end of `grace_period` [s] after SIGTERM, raises
    SignalException, on which the agent ends the ranks. So does the first signal if there are no ranks yet.
    """

    def __init__(self, *, grace_period: float) -> None:
        self.signal: int | None = None
        self._grace_period = grace_period
        self._since = 0.0
        self._timer: threading.Timer | None = None
        self._is_over = False  # the grace period
        self._before: Mapping[int, Any] = {}

    def __enter__(self) -> Self:
        handled = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._handle) for number in handled}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._timer is not None:
            self._timer.cancel()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.signal is not None and not self._is_over and time.monotonic() - self._since < SAME_REQUEST_S:
            return
        ranks = psutil.Process().children()
        if self.signal is not None or not ranks:
            self.signal = self.signal or number
            raise SignalException("stopped", sigval=signal.SIGTERM)
        self.signal, self._since = number, time.monotonic()
        for rank in ranks:
            try:
                rank.send_signal(signal.SIGINT)
            except psutil.NoSuchProcess:  # it has just ended, on which the agent acts
                continue
        if number == signal.SIGTERM:
            self._timer = threading.Timer(self._grace_period, self._end)
            self._timer.daemon = True
            self._timer.start()

    def _end(self) -> None:
        self._is_over = True
        os.kill(os.getpid(), signal.SIGTERM)  # the main thread raises
