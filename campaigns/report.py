"""What every campaign shares: the results file with its header, and the line of progress."""

import json
import shlex
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks import record

RESULTS = Path(__file__).parent / "results"


class Report:
    """Rows of one campaign. A row is a dict with `group` and `failure`: None, or what did not hold, in one line."""

    def __init__(self, name: str, law: str, *, module: str = "") -> None:
        self.name = name
        self.rows: list[dict[str, Any]] = []
        self._law = law
        self._start = time.monotonic()
        self._header = record.header() | {
            "command": shlex.join(["python", "-m", f"campaigns.{module or name}", *sys.argv[1:]]),
            "date": f"{datetime.now().astimezone():%F %T %z}",
        }

    def add(self, group: str, failure: str | None, **details: Any) -> None:
        """Add a row, print it in one line, and write the file anew, so that an interrupted campaign leaves its rows."""
        self.rows.append({"group": group, "failure": failure, **details})
        shown = "  ".join(f"{name}={value}" for name, value in details.items())
        print(f"{len(self.rows):4} {group}: {failure or 'held'}  {shown}"[:300], flush=True)
        self.write()

    def write(self, **more: Any) -> None:
        seconds = round(time.monotonic() - self._start)
        head = {"law": self._law, **self._header, "seconds": seconds, "groups": self.groups(), **more}
        save(RESULTS / f"{self.name}.json", head, self.rows)

    def groups(self) -> dict[str, dict[str, int]]:
        """Count rows and failures by group."""
        counts = Counter(row["group"] for row in self.rows)
        failed = Counter(row["group"] for row in self.rows if row["failure"])
        return {group: {"rows": count, "failed": failed[group]} for group, count in sorted(counts.items())}

    def finish(self) -> int:
        """Print the table by group and return the exit code."""
        if self.rows:
            print(record.table([{"group": name, **counts} for name, counts in self.groups().items()]))
        failed: Sequence[Mapping[str, Any]] = [row for row in self.rows if row["failure"]]
        for row in failed:
            print(f"FAILED {row}")
        return 1 if failed else 0


def save(path: Path, head: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a results file atomically, with one line for each row."""
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    partial = path.with_suffix(".partial")
    partial.write_text(f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n{lines}\n ]\n}}\n')
    partial.replace(path)
