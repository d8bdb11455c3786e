"""An end for calls of an engine in this very process: it is foreign code, and may hang where nothing interrupts it."""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fsdptrain.errors import RolloutError

_FLAG = "--rollout-timeout"
_GRACE = 1.25  # for a call that looks at the clock itself: its step must end first


class CallLimit:
    """--rollout-timeout of one call at a time: by a RolloutError where the call asks `check` now and then, else by the
    end of the process, after its stacks were written.

    A thread watches: only code that never lets go of Python's lock escapes it.
    """

    def __init__(self, seconds: float, folder: Path, rank: int) -> None:
        """folder: for stacks. It is made when it is needed."""
        self.seconds = seconds
        self._path = folder / f"rank{rank}_hung.txt"  # the next run leaves it there
        self._end = time.monotonic()

    @contextmanager
    def around(self, call: str, *, checked: bool = False) -> Iterator[None]:
        """checked: `call` asks `check`, and is given a quarter more to do so."""
        self._end = time.monotonic() + self.seconds
        seconds = self.seconds * (_GRACE if checked else 1.0)
        timer = threading.Timer(seconds, self._end_process, (call, seconds))
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
        return RolloutError(f"{call} took more than {_FLAG}, {self.seconds:g} s: raise it, or ask for less at one time")

    def _end_process(self, call: str, seconds: float) -> None:
        """With an exit code after which --resume auto, and --max-restarts, go on."""
        where = str(self._path)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                faulthandler.dump_traceback(file)
        except OSError as error:
            where = str(error)
        finally:
            sys.stderr.write(
                f"fsdptrain: {_FLAG} {self.seconds:g}: {call} has hung for {seconds:g} s, and cannot be interrupted; "
                f"where it stood: {where}\n"
            )
            sys.stderr.flush()
            os._exit(1)
