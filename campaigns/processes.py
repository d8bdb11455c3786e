"""The processes of a run, seen from outside: those that inherited its mark in their environment, or its session."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

MARK = "FSDPTRAIN_CAMPAIGN_MARK"  # environment variable


def processes_of(mark: str, session: int | None = None) -> list[int]:
    """Return the processes with `MARK` = mark in their environment or in the session, without zombies."""
    return [pid for pid in _pids() if _belongs(pid, f"{MARK}={mark}".encode(), session)]


def survivors(mark: str, session: int | None = None, *, patience_s: float = 15.0) -> list[str]:
    """Wait for all processes of a run to end. Returns the command lines of those that have not."""
    deadline = time.monotonic() + patience_s
    while (pids := processes_of(mark, session)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [command_of(pid) for pid in pids]


def command_of(pid: int) -> str:
    try:
        return " ".join(Path(f"/proc/{pid}/cmdline").read_text().split("\0"))[-120:].strip()
    except OSError:
        return ""


def memory_of(pid: int) -> dict[str, int]:
    """Return the fields of /proc/PID/status that count memory, in KiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) for line in lines if line.endswith(" kB")}


def _belongs(pid: int, mark: bytes, session: int | None) -> bool:
    try:
        state, _, _, sid = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[:4]
        if state == "Z":
            return False
        return int(sid) == session or mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended
        return False


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid())
