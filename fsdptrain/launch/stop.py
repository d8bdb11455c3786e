"""Requests to stop a run, passed on from the launcher to its ranks."""

import os
import signal
from contextlib import suppress
from typing import NoReturn, Self

import psutil
from torch.distributed.elastic.multiprocessing import SignalException

from fsdptrain.signals import StopSignals, heeded


class ForwardStop(StopSignals):
    """Context manager that passes the first SIGINT or SIGTERM on to the ranks as SIGINT.

    The ranks then stop after the current step. A second signal, or the end of `grace_period` [s] after SIGTERM, raises
    SignalException, on which the agent ends the ranks. So does the first signal if there are no ranks yet.
    """

    def __enter__(self) -> Self:
        self.install(heeded([signal.SIGINT, signal.SIGTERM]))
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()

    def first(self, number: int) -> None:
        ranks = psutil.Process().children()
        if not ranks:
            self.again(number)
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):  # it has just ended, on which the agent acts
                rank.send_signal(signal.SIGINT)

    def again(self, number: int) -> NoReturn:
        del number
        raise SignalException("stopped", sigval=signal.SIGTERM)

    def overdue(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)  # the main thread raises
