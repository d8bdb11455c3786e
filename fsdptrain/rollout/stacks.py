"""Write the stacks of every rank when a wait takes too long."""

import contextlib
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from fsdptrain.errors import FsdptrainError

_FALLBACK_S = 2.0  # after the deadline


class StackDump:
    """Writes the stacks of all threads of this rank to a file, unless it is armed again or disarmed in time.

    Every rank arms its own at the same collective steps. So when one rank gives up waiting, the others have written
    theirs too, on any machine, and even inside a collective that never returns.

    A thread writes the stacks, because faulthandler omits the main thread if there are more than 100 threads.
    faulthandler itself follows a little later, in case the thread cannot run because something holds the GIL.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.path = folder / f"rank{rank}.txt"
        self._file = self.path.open("a")  # a restarted run keeps the stacks of the one before
        self._changed = threading.Condition()  # guards the file and the fields below
        self._due: float | None = None  # [s, monotonic]
        self._writer: threading.Thread | None = None

    @contextlib.contextmanager
    def around(self, seconds: float) -> Iterator[None]:
        """Wrap work that all ranks start together and that takes much less than `seconds`."""
        start = time.monotonic()
        self.arm(seconds)
        try:
            yield
        except Exception as error:
            if time.monotonic() - start >= seconds:
                self.point_out(error)
            raise
        finally:
            self.disarm()

    def arm(self, seconds: float) -> None:
        """Write the stacks in `seconds`. Replaces the previous deadline."""
        with self._changed:
            faulthandler.dump_traceback_later(seconds + _FALLBACK_S, file=self._file)
            self._due = time.monotonic() + seconds
            if self._writer is None:
                self._writer = threading.Thread(target=self._write_when_due, name="stacks", daemon=True)
                self._writer.start()
            self._changed.notify()

    def disarm(self) -> None:
        with self._changed:
            faulthandler.cancel_dump_traceback_later()
            self._due = None

    def dump(self) -> None:
        """Write the stacks now: the main thread first, and equal stacks once, with their count. No-op once closed."""
        names, at = {thread.ident: thread.name for thread in threading.enumerate()}, dict[str, list[str]]()
        main = threading.main_thread().ident
        for ident, frame in sorted(sys._current_frames().items(), key=lambda thread: thread[0] != main):
            at.setdefault("".join(traceback.format_stack(frame)), []).append(names.get(ident, "?"))
        with self._changed:
            if self._file.closed:
                return
            self._file.write(f"Process {os.getpid()} at {datetime.now().astimezone():%F %T%z}\n\n")
            for stack, found in at.items():
                self._file.write(f"{len(found)} x {found[0]} (most recent call last)\n{stack}\n")
            self._file.flush()

    def point_out(self, error: Exception) -> None:
        """Add the folder of the stacks to the message of `error`."""
        if isinstance(error, FsdptrainError):  # only its message is shown
            error.args = (f"{error}; stacks of each rank: {self.folder}",)
        else:
            error.add_note(f"Stacks of each rank: {self.folder}")

    def close(self) -> None:
        """Delete the file if nothing was written."""
        with self._changed:
            self.disarm()
            if self._file.closed:
                return
            self._file.close()
            self._changed.notify()
        if not self.path.stat().st_size:
            self.path.unlink()
            with contextlib.suppress(OSError):  # other ranks have files there
                self.folder.rmdir()

    def _write_when_due(self) -> None:
        with self._changed:
            while not self._file.closed:
                left = None if self._due is None else self._due - time.monotonic()
                if left is not None and left <= 0:
                    self.dump()
                    self.disarm()
                else:
                    self._changed.wait(left)
