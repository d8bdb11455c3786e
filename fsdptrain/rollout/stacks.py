"""Where every rank stood when a wait took too long."""

import faulthandler
from pathlib import Path


class StackDump:
    """Writes the stacks of all threads of this rank to a file once it was not told for a while that things go on.

    Each rank has its own, and each is armed by what all ranks do together: when one gives up waiting, the others have
    written theirs too, on whatever machine they are, and also from within a collective that never returns.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._file = (folder / f"rank{rank}.txt").open("w")

    def arm(self, seconds: float) -> None:
        """From now; what was armed before is forgotten."""
        faulthandler.dump_traceback_later(seconds, file=self._file)

    def disarm(self) -> None:
        faulthandler.cancel_dump_traceback_later()

    def dump(self) -> None:
        """Now."""
        faulthandler.dump_traceback(file=self._file)

    def close(self) -> None:
        self.disarm()
        self._file.close()
