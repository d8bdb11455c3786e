"""Read a JSON lines file of a run while the run appends to it."""

import json
import os
from pathlib import Path
from typing import Any


class Tail:
    """Returns the rows that were added since the last call. A file that a resumed run has replaced is read anew."""

    def __init__(self, path: Path, *, most_bytes: int | None = None) -> None:
        """most_bytes: read at most so many from the end of a file that is there already. None: all."""
        self._path = path
        self._most_bytes = most_bytes
        self._file: tuple[int, int] | None = None  # device and inode
        self._offset = 0

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """Return (whether the rows of earlier calls are void, new rows). Skips lines that are not a record of a run."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                identity = (status.st_dev, status.st_ino)
                known = identity == self._file and status.st_size >= self._offset
                is_void = self._file is not None and not known
                if not known:
                    self._file = identity
                    self._offset = max(0, status.st_size - (self._most_bytes or status.st_size))
                is_inside_line = not known and self._offset > 0
                file.seek(self._offset)
                data = file.read(status.st_size - self._offset)
        except FileNotFoundError:
            return False, []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        lines = whole.split(b"\n")[1 if is_inside_line else 0 : -1]
        return is_void, [row for line in lines if (row := _parse(line)) is not None]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
        return row if isinstance(row["step"], int | float) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
