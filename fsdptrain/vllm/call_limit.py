"""A deadline for calls of an engine in this process, which may hang where nothing can interrupt them."""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class CallLimit:
    """--rollout-timeout, for one call at a time: a longer one ends the process, after its stacks are written to stderr.

    A thread watches: only code that never releases the GIL escapes it.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.restart()

    @contextmanager
    def around(self, call: str) -> Iterator[None]:
        self.restart()
        done = threading.Event()
        watch = threading.Thread(target=self._watch, args=(call, done), daemon=True)
        watch.start()
        try:
            yield
        finally:
            done.set()
            watch.join()

    def restart(self) -> None:
        """Give the call its time again, from now on."""
        self._end = time.monotonic() + self._seconds

    def _watch(self, call: str, done: threading.Event) -> None:
        while not done.wait(self._end - time.monotonic()):
            if time.monotonic() >= self._end:
                _end_process(
                    f"fsdptrain: --rollout-timeout {self._seconds:g}: {call} takes longer and cannot be interrupted: "
                    "raise it, or see the stacks above"
                )


def _end_process(line: str) -> None:
    """With an exit code after which the same command continues."""
    try:
        faulthandler.dump_traceback(sys.stderr)
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
    finally:
        os._exit(1)
