"""Requests to stop a run after the current step: Ctrl-C, SIGTERM of a cluster, a callback."""

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from types import FrameType, TracebackType
from typing import Any, Self

from fsdptrain.distributed import any_rank, gather
from fsdptrain.errors import FsdptrainError
from fsdptrain.rank_variables import has_fsdptrain_launcher

SAME_REQUEST_S = 1.0  # [s] within which signals count as one: a terminal and a launcher may both send it


class StopRequest:
    """Context manager that turns the first SIGINT or SIGTERM into a request to stop after the current step.

    A second signal raises KeyboardInterrupt. After SIGTERM the process exits with code 143 when `grace_period` [s] has
    passed. Ranks that the fsdptrain command has started keep the default action of SIGTERM, by which their launcher
    ends them; it passes on requests as SIGINT. Outside of the main thread, where Python permits no handlers, signals
    keep their actions.
    """

    def __init__(self, *, grace_period: float) -> None:
        self.reason = ""  # why this rank stops; "": it does not
        self.signal: int | None = None
        self._grace_period = grace_period
        self._since = 0.0
        self._timer: threading.Timer | None = None
        self._before: Mapping[int, Any] = {}
        self._parent = 0

    def __enter__(self) -> Self:
        self.reason, self.signal, self._parent = "", None, os.getppid()
        if threading.current_thread() is threading.main_thread():
            # its launcher sends SIGINT to a rank, which a run in the background inherits as ignored
            launched = has_fsdptrain_launcher()
            handled = [signal.SIGINT] if launched else [signal.SIGINT, signal.SIGTERM]
            heeded = [number for number in handled if launched or signal.getsignal(number) != signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._handle) for number in heeded}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._timer is not None:
            self._timer.cancel()
        is_own = error is None or isinstance(error, FsdptrainError | KeyboardInterrupt)
        if self.signal == signal.SIGTERM and "RANK" in os.environ and not is_own:
            # torchrun ends the ranks that are left after the failure of one: their errors are its consequences
            os.kill(os.getpid(), signal.SIGTERM)

    def ask(self, reason: str) -> None:
        """Stop after the current step, on all ranks, if one of them asks."""
        self.reason = self.reason or reason

    def on_any_rank(self) -> bool:
        """Return whether any rank was asked to stop. Collective."""
        return any_rank(bool(self.reason))

    def first_of_ranks(self) -> tuple[str, int | None]:
        """Return reason and signal of the first rank that was asked to stop. Collective."""
        return next(request for request in gather((self.reason, self.signal)) if request[0])

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if (
            number == signal.SIGTERM and os.getppid() != self._parent
        ):  # torchrun's agent has died: see `exit_with_parent`
            os._exit(128 + number)
        if self.signal is not None and time.monotonic() - self._since > SAME_REQUEST_S:
            raise KeyboardInterrupt
        if self.signal is None:
            self._since, self.signal = time.monotonic(), number
            self.reason = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
            if os.environ.get("RANK", "0") == "0":
                _tell(f"{self.reason}: stops after this step and saves a checkpoint; once more stops at once")
            if number == signal.SIGTERM:
                self._timer = threading.Timer(self._grace_period, self._end)
                self._timer.daemon = True
                self._timer.start()

    def _end(self) -> None:
        _tell(f"the step was not finished within --grace-period {self._grace_period:g} s after SIGTERM: ends")
        os._exit(128 + signal.SIGTERM)


def _tell(line: str) -> None:
    """Write to stderr. Its buffer may be in use by the code that the signal has interrupted."""
    try:
        number = sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):  # replaced, for example by a test
        number = 2
    os.write(number, f"fsdptrain: {line}\n".encode())
