"""A deadline for calls of an engine in this process, which may hang where nothing can interrupt them."""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from fsdptrain.errors import RolloutError

_FLAG = "--rollout-timeout"
_GRACE = 1.25  # for a call that checks the deadline itself, between two steps


class CallLimit:
    """--rollout-timeout, for one call at a time.

    A call that checks `is_over` ends with a RolloutError. Any other one ends the process, after its stacks were
    written to stderr. A thread watches: only code that never releases the GIL escapes it.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic()

    @contextmanager
    def around(self, call: str, *, checked: bool = False) -> Iterator[None]:
        """checked: the call checks `is_over` and gets 25 % more time to do so."""
        self._end = time.monotonic() + self.seconds
        seconds = self.seconds * (_GRACE if checked else 1.0)
        line = f"{call} hangs for {seconds:g} s and cannot be interrupted; stacks are above"
        timer = threading.Timer(seconds, _end_process, [f"fsdptrain: {_FLAG} {self.seconds:g}: {line}"])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._end

    def error(self, call: str) -> RolloutError:
        return RolloutError(
            f"{call} took more than {_FLAG}, {self.seconds:g} s: raise it, or generate fewer tokens per call"
        )


def _end_process(line: str) -> None:
    """With an exit code after which the same command continues."""
    try:
        faulthandler.dump_traceback(sys.stderr)
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
    finally:
        os._exit(1)
