"""Where every rank stood when a wait took too long."""

import contextlib
import faulthandler
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from fsdptrain.errors import FsdptrainError

_FALLBACK_S = 2.0  # after the stacks are due


class StackDump:
    """Writes the stacks of all threads of this rank to a file once it was not told for a while that things go on.

    Each rank has its own, and each is armed by what all ranks do together: when one gives up waiting, the others have
    written theirs too, on whatever machine they are, and also from within a collective that never returns.

    A thread writes them: faulthandler leaves out the main thread where there are more than 100. That comes a little
    later, and only if the thread could not write, because something holds Python's lock.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._path = folder / f"rank{rank}.txt"
        self._file = self._path.open("w")
        self._changed = threading.Condition()  # held while stacks are written, or what follows changes
        self._due: float | None = None  # [s, monotonic]
        self._writer: threading.Thread | None = None

    @contextlib.contextmanager
    def around(self, seconds: float) -> Iterator[None]:
        """What all ranks begin together and do in much less than `seconds`; an error that came later says where their
        stacks are."""
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
        """From now; what was armed before is forgotten."""
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
        """Now: the main thread first, and those that stand at one place once, with their number."""
        names, at = {thread.ident: thread.name for thread in threading.enumerate()}, dict[str, list[str]]()
        main = threading.main_thread().ident
        for ident, frame in sorted(sys._current_frames().items(), key=lambda thread: thread[0] != main):
            at.setdefault("".join(traceback.format_stack(frame)), []).append(names.get(ident, "?"))
        with self._changed:
            for stack, found in at.items():
                self._file.write(f"{len(found)} x {found[0]} (most recent call last)\n{stack}\n")
            self._file.flush()

    def point_out(self, error: Exception) -> None:
        """Let `error` say where the stacks of all ranks are."""
        if isinstance(error, FsdptrainError):  # of which nothing but the message is shown
            error.args = (f"{error}; where each rank stood: {self.folder}",)
        else:
            error.add_note(f"Where each rank stood: {self.folder}")

    def close(self) -> None:
        """Where nothing was written nothing is left."""
        with self._changed:
            self.disarm()
            if self._file.closed:
                return
            self._file.close()
            self._changed.notify()
        if not self._path.stat().st_size:
            self._path.unlink()
            with contextlib.suppress(OSError):  # others are there
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
