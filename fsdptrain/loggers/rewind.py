"""The records of a run up to a checkpoint, for a run that resumes from it."""

import json
import logging
from pathlib import Path

log = logging.getLogger(__name__)


def rewind(path: Path, step: int) -> None:
    """Drop the records after `step`."""
    temporary = path.with_name(f".{path.name}.half")
    temporary.touch(mode=path.stat().st_mode)
    temporary.write_text("".join(lines_until(path, step)), encoding="utf-8")
    temporary.replace(path)  # atomic: after a kill, either the old or the new file exists


def lines_until(path: Path, step: int) -> list[str]:
    """Return the lines of steps up to `step`. Warns of those that are no record, as an incomplete last one."""
    lines, broken = [], []
    text = path.read_text(encoding="utf-8", errors="replace").removesuffix("\n")
    for number, line in enumerate(text.split("\n") if text else [], start=1):
        try:
            if json.loads(line)["step"] <= step:
                lines.append(line + "\n")
        except (ValueError, KeyError, TypeError, RecursionError):
            broken.append(str(number))
    if broken:
        log.warning("%s: dropped what is no record, in line %s", path, ", ".join(broken[:5]))
    return lines
