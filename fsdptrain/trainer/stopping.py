"""Requests to stop a run after the current step: Ctrl-C, SIGTERM of a cluster, a callback."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from fsdptrain.distributed import any_rank, gather
from fsdptrain.errors import FsdptrainError
from fsdptrain.rank_variables import has_fsdptrain_launcher
from fsdptrain.signals import heeded, stop_signals


class StopRequest:
    """Whether this rank, or any, was asked to stop after the current step."""

    def __init__(self) -> None:
        self.reason = ""  # why this rank stops; "": it does not
        self.signal: int | None = None

    @contextmanager
    def from_signals(self) -> Iterator[None]:
        """Within the context, the first SIGINT or SIGTERM is a request to stop; a second raises KeyboardInterrupt.

        Ranks that the fsdptrain command has started keep the default action of SIGTERM, by which their launcher ends
        them; it passes on requests as SIGINT. Outside of the main thread, where Python permits no handlers, signals
        keep their actions.
        """
        self.reason, self.signal, parent = "", None, os.getppid()

        def first(number: int) -> None:
            if number == signal.SIGTERM and os.getppid() != parent:  # torchrun's agent died: see `exit_with_parent`
                os._exit(128 + number)
            self.signal, self.reason = number, "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
            if os.environ.get("RANK", "0") == "0":  # past the buffer of stderr, which interrupted code may be using
                line = f"{self.reason}: stops after this step and saves a checkpoint; press again to stop immediately"
                os.write(2, f"fsdptrain: {line}\n".encode())

        # SIGINT of our launcher also if it is ignored, as in a run in the background
        numbers = [signal.SIGINT] if has_fsdptrain_launcher() else heeded()
        in_main_thread = threading.current_thread() is threading.main_thread()
        try:
            with stop_signals(numbers if in_main_thread else [], first=first, again=_interrupt):
                yield
        except Exception as error:
            if self.signal == signal.SIGTERM and "RANK" in os.environ and not isinstance(error, FsdptrainError):
                # torchrun ends the ranks that are left after the failure of one: their errors are its consequences
                os.kill(os.getpid(), signal.SIGTERM)
            raise

    def ask(self, reason: str) -> None:
        """Stop after the current step, on all ranks, if one of them asks."""
        self.reason = self.reason or reason

    def of_ranks(self) -> tuple[str, int | None] | None:
        """Return reason and signal of the first rank that was asked to stop; None if none was. Collective."""
        requests = gather((self.reason, self.signal)) if any_rank(bool(self.reason)) else []
        return next((request for request in requests if request[0]), None)


def _interrupt() -> NoReturn:
    raise KeyboardInterrupt
