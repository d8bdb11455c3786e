"""What every campaign shares: rows, the line of progress, the exit code, and the report of --json."""

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks import record


class Report:
    """Rows of one campaign. A row has `group` and `failure`: None, or what did not hold, in one line."""

    def __init__(self, law: str, path: Path | None) -> None:
        self.rows: list[dict[str, Any]] = []
        self._path = path
        self._head = {"law": law, **record.header()}
        self._start = time.monotonic()

    def add(self, group: str, failure: str | None, **details: Any) -> None:
        """Add a row, print it in one line, and write the report, so that an interrupted campaign leaves its rows."""
        self.rows.append({"group": group, "failure": failure, **details})
        shown = "  ".join(f"{name}={value}" for name, value in details.items())
        print(f"{len(self.rows):4} {group}: {failure or 'held'}  {shown}"[:300], flush=True)
        record.write(self._path, {**self._head, "seconds": round(time.monotonic() - self._start), "rows": self.rows})

    def finish(self) -> int:
        """Print the table by group and return the exit code."""
        counts = Counter(row["group"] for row in self.rows)
        failed = Counter(row["group"] for row in self.rows if row["failure"])
        if counts:
            rows: list[dict[str, Any]] = [{"group": g, "rows": n, "failed": failed[g]} for g, n in counts.items()]
            print(record.table(rows))
        for row in self.rows:
            if row["failure"]:
                print(json.dumps(row))
        return 1 if failed else 0
