"""Where every rank stood when a wait took too long."""

import contextlib
import faulthandler
import time
from collections.abc import Iterator
from pathlib import Path


class StackDump:
    """Writes the stacks of all threads of this rank to a file once it was not told for a while that things go on.

    Each rank has its own, and each is armed by what all ranks do together: when one gives up waiting, the others have
    written theirs too, on whatever machine they are, and also from within a collective that never returns.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._path = folder / f"rank{rank}.txt"
        self._file = self._path.open("w")

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
                error.add_note(f"Where each rank stood: {self.folder}")
            raise
        finally:
            self.disarm()

    def arm(self, seconds: float) -> None:
        """From now; what was armed before is forgotten."""
        faulthandler.dump_traceback_later(seconds, file=self._file)

    def disarm(self) -> None:
        faulthandler.cancel_dump_traceback_later()

    def dump(self) -> None:
        """Now."""
        faulthandler.dump_traceback(file=self._file)

    def close(self) -> None:
        """Where nothing was written nothing is left."""
        self.disarm()
        if self._file.closed:
            return
        self._file.close()
        if not self._path.stat().st_size:
            self._path.unlink()
            with contextlib.suppress(OSError):  # others are there
                self.folder.rmdir()
