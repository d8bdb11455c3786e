"""Why ranks ended: what each leaves for those who started it, and which of several errors is the cause."""

import json
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

FAILURES = "FSDPTRAIN_FAILURES"  # folder in which ranks leave their errors for the process that started them
AGENT = "agent.json"  # in it: what torch's agent saw of them


class Level(IntEnum):
    """How near an error is to the cause."""

    OWN = 0  # of the rank itself
    NODE = 1  # a machine is gone
    ECHO = 2  # tells the error of another rank
    LOST = 3  # another rank does not answer


@dataclass(frozen=True)
class Failure:
    """Why a rank ended."""

    rank: int
    time: float  # [s] since the epoch
    text: str  # the message, or the traceback
    mendable: bool  # an FsdptrainError
    level: int = Level.OWN
    again: bool = True  # from the newest checkpoint it may go well

    def line(self) -> str:
        return f"fsdptrain: {self.text}\n"

    def write(self, directory: Path) -> None:
        half = directory / f".rank{self.rank}"
        half.write_text(json.dumps(vars(self)))
        half.rename(directory / f"rank{self.rank}.json")


@dataclass(frozen=True)
class Report:
    """Why a machine ended its part of a run."""

    text: str  # one line if `code` is 2, or one and a traceback; "": it has been said
    code: int = 2  # of the command
    level: int = Level.OWN
    again: bool = True  # from the newest checkpoint it may go well

    def of_node(self, node: str) -> "Report":
        return Report(f"{node}: {self.text}" if self.text else "", self.code, self.level, self.again)


def read_failures(directory: Path) -> list[Failure]:
    """What the ranks of this machine left, the cause first: what only echoes another rank comes last."""
    found = [Failure(**json.loads(path.read_text())) for path in directory.glob("rank*.json")]
    return sorted(found, key=lambda failure: (failure.level, failure.time))


def read_report(directory: Path, agent_code: int, *, stopped: bool = False) -> Report:
    """Of the ranks of this machine, where they did not all end well. stopped: from outside, or they fell ill alone."""
    seen = directory / AGENT
    if not seen.is_file() and not stopped:
        return Report(f"the process that watches the ranks ended with exit code {agent_code}", code=1)
    codes = {int(rank): code for rank, code in json.loads(seen.read_text()).items()} if seen.is_file() else {}
    failures = read_failures(directory)
    killed = _killed(codes)
    if killed is None:
        return _explained(codes, failures)
    rank, name = killed
    aborted = name == "SIGABRT"  # what a watchdog in C++ does that misses another rank; or it is the cause
    if failures and failures[0].level == Level.OWN and (aborted or failures[0].rank == rank):
        return _explained({}, failures)
    hint = "; the host may be out of memory: see dmesg, use fewer --nproc-per-node" if name == "SIGKILL" else ""
    return Report(f"rank {rank} was killed by {name}{hint}", level=Level.ECHO if aborted else Level.OWN)


def _killed(codes: Mapping[int, int]) -> tuple[int, str] | None:
    """A rank and its signal; SIGABRT last, which may only follow another one's end."""
    found = [(rank, signal.Signals(-code).name) for rank, code in codes.items() if code < 0]
    found = [(rank, name) for rank, name in found if name != "SIGTERM"]  # sent by the agent to the others
    return min(found, key=lambda one: (one[1] == "SIGABRT", one[0])) if found else None


def _explained(codes: Mapping[int, int], failures: list[Failure]) -> Report:
    told = {failure.rank for failure in failures}
    silent = [(rank, code) for rank, code in codes.items() if code > 0 and rank not in told]
    if silent:  # the errors of the others only say that this one is gone
        rank, code = silent[0]
        if code == 2:  # the rank has said what was wrong with its command line
            return Report("", again=False)
        return Report(f"rank {rank} ended with exit code {code} and left no error", code=code)
    if not failures:
        return Report("its ranks were stopped", level=Level.LOST)
    first = failures[0]
    if first.mendable:
        return Report(first.text, 2, first.level, first.again)
    return Report(f"rank {first.rank} failed\n{first.text.rstrip()}", 1, first.level, first.again)


def is_told() -> Path | None:
    """The folder for the errors of this rank, where one of our own processes has started it."""
    return Path(os.environ[FAILURES]) if FAILURES in os.environ else None
