"""Write the stacks of every rank when a wait takes too long."""

import faulthandler
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fsdptrain.errors import FsdptrainError


class StackDump:
    """Writes the stacks of all threads of this rank to a file, unless it is armed again or disarmed in time.

    Every rank arms its own at the same collective steps. So when one rank gives up waiting, the others have written
    theirs too, on any machine, and even inside a collective that never returns.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.path = folder / f"rank{rank}.txt"
        self._file = self.path.open("a")  # a restarted run keeps the stacks of the one before

    @contextmanager
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
        faulthandler.dump_traceback_later(seconds, file=self._file)

    def disarm(self) -> None:
        faulthandler.cancel_dump_traceback_later()

    def dump(self) -> None:
        """Write the stacks now. No-op once closed."""
        if not self._file.closed:
            faulthandler.dump_traceback(self._file)

    def point_out(self, error: Exception) -> None:
        """Add the folder of the stacks to the message of `error`."""
        if isinstance(error, FsdptrainError):  # only its message is shown
            error.args = (f"{error}; stacks of each rank: {self.folder}",)
        else:
            error.add_note(f"Stacks of each rank: {self.folder}")

    def close(self) -> None:
        """Delete the file if nothing was written."""
        self.disarm()
        if self._file.closed:
            return
        self._file.close()
        if not self.path.stat().st_size:
            self.path.unlink()
            with suppress(OSError):  # other ranks have files there
                self.folder.rmdir()
