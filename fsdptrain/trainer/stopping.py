"""Requests to stop a run after the current step: Ctrl-C, SIGTERM of a cluster, a callback."""

import os
import signal
import sys
import threading
from types import TracebackType
from typing import NoReturn, Self

from fsdptrain.distributed import any_rank, gather
from fsdptrain.errors import FsdptrainError
from fsdptrain.rank_variables import has_fsdptrain_launcher
from fsdptrain.signals import StopSignals, heeded


class StopRequest(StopSignals):
    """Context manager that turns the first SIGINT or SIGTERM into a request to stop after the current step.

    A second signal raises KeyboardInterrupt. After SIGTERM the process exits with code 143 when `grace_period` [s] has
    passed. Ranks that the fsdptrain command has started keep the default action of SIGTERM, by which their launcher
    ends them; it passes on requests as SIGINT. Outside of the main thread, where Python permits no handlers, signals
    keep their actions.
    """

    def __init__(self, *, grace_period: float) -> None:
        super().__init__(grace_period=grace_period)
        self.reason = ""  # why this rank stops; "": it does not
        self._parent = 0  # process

    def __enter__(self) -> Self:
        self.reason, self.signal, self._parent = "", None, os.getppid()
        if threading.current_thread() is not threading.main_thread():
            return self
        if has_fsdptrain_launcher():
            self.install([signal.SIGINT])  # also if it is ignored, as in a run in the background
        else:
            self.install(heeded([signal.SIGINT, signal.SIGTERM]))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.restore()
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

    def first(self, number: int) -> None:
        if number == signal.SIGTERM and os.getppid() != self._parent:  # torchrun's agent died: see `exit_with_parent`
            os._exit(128 + number)
        self.reason = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
        if os.environ.get("RANK", "0") == "0":
            _write_line(f"{self.reason}: stops after this step and saves a checkpoint; once more stops at once")

    def again(self, number: int) -> NoReturn:
        raise KeyboardInterrupt

    def overdue(self) -> None:
        _write_line(f"the step was not finished within --grace-period {self._grace_period:g} s after SIGTERM: ends")
        os._exit(128 + signal.SIGTERM)


def _write_line(line: str) -> None:
    """Write to stderr. Its buffer may be in use by the code that the signal has interrupted."""
    try:
        number = sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):  # replaced, for example by a test
        number = 2
    os.write(number, f"fsdptrain: {line}\n".encode())
