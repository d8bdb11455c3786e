"""SIGKILL at random moments, then the same command again.

Law: a run that is killed at any moment, and started again with the same command as often as needed, ends with the same
metrics (except times, speed, memory), samples and exported files, bit by bit, as a run that nobody killed. And no
process of a killed run is alive 15 s later; where ranks have no agent, --dist-timeout (30 s) later.

A chain is a run that is killed and started again until it ends before its next kill, or was killed eight times; then
its results are compared. A kill comes at any moment, or 0 to 50 ms after a checkpoint or the export has begun.

    python -m campaigns.kills --count 200 --seed 0
"""

import argparse
import hashlib
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from campaigns.report import Report
from tests.e2e import command
from tests.testing import preloaded_context, rank_variables, reserved_port, save_tiny_checkpoint

MARK = "FSDPTRAIN_CAMPAIGN_MARK"  # environment variable that the processes of a run inherit
TINY = [*command.TINY_RUN, *("--num-rollout", "6", "--global-batch-size", "8", "--epochs-per-rollout", "2")]
TINY += ["--save-interval", "1", "--eval-interval", "3"]
CHECKPOINT, EXPORT = "checkpoints/.tmp-*", ".fsdptrain-*"  # a name in the output folder shows what has begun
RUN_TIMEOUT = 180.0
MAX_KILLS = 8  # in a chain
# Times, speed and memory. Weight syncs: a resumed run has one more, and metrics of the one before its first step only.
_NOT_COMPARED = ("perf/", "weight_sync/", "time")
_numbers = itertools.count()


@dataclass(frozen=True)
class Group:
    name: str
    share: int  # of 200 kills
    argv: Sequence[str] = ()
    num_ranks: int = 1
    aim: str | None = None  # a pattern of names in the output folder: kill after one has appeared
    victim: str = "all"  # or "rank", "launcher"


TWO = ["--nproc-per-node", "2"]
GROUPS = [
    Group("one process", 70),
    Group("checkpoint", 35, aim=CHECKPOINT),
    Group("async checkpoint", 30, ["--async-save"], aim=CHECKPOINT),
    Group("export", 20, aim=EXPORT),
    Group("one of two ranks", 20, ["--dist-timeout", "30"], num_ranks=2, victim="rank"),
    Group("launcher", 10, TWO, victim="launcher"),
    Group("launcher and ranks, checkpoint", 15, TWO, aim=CHECKPOINT),
]


class Run:
    """One start of the command, on more than one rank as torchrun starts it, each process in a session of its own."""

    def __init__(self, group: Group, argv: Sequence[str], logs: Path) -> None:
        self.mark = f"{os.getpid()}-{next(_numbers)}"
        self.log = logs / self.mark
        self.begin = time.monotonic()
        self.processes: list[ForkServerProcess] = []
        with reserved_port() as port:
            for rank in range(group.num_ranks):
                variables = rank_variables(rank, group.num_ranks, port) if group.num_ranks > 1 else {}
                output = self.log / f"rank{rank}"
                output.mkdir(parents=True)
                arguments = ([*argv, *group.argv], output, {**variables, MARK: self.mark})
                self.processes.append(preloaded_context().Process(target=_in_own_session, args=arguments))
                self.processes[-1].start()

    def pids(self) -> list[int]:
        """Return all processes of the run, without zombies: those it began with, with its mark, or in its sessions."""
        sessions = {process.pid for process in self.processes}
        numbers = (int(name) for name in os.listdir("/proc") if name.isdigit())
        found = {pid for pid in numbers if pid != os.getpid() and _belongs(pid, self.mark, sessions)}
        return [*found.union(process.pid for process in self.processes if process.is_alive() and process.pid)]

    def is_alive(self) -> bool:
        return any(process.is_alive() for process in self.processes)

    def wait(self, timeout: float) -> list[int | None]:
        """Return the exit codes; None for a process that has not ended in time."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process in self.processes]

    def wait_until(self, done: Callable[[], object]) -> bool:
        """Return True once `done()` is true, False once the run has ended."""
        while self.is_alive():
            if done():
                return True
            time.sleep(0.0005)
        return False

    def orphans(self, patience_s: float) -> str | None:
        """Wait until all processes have ended. Kills those that have not, and says how many."""
        deadline = time.monotonic() + patience_s
        while (left := self.pids()) and time.monotonic() < deadline:
            time.sleep(0.05)
        kill(left)
        return f"{len(left)} processes are alive after {patience_s:g} s" if left else None

    def error(self) -> str:
        return " / ".join(path.read_text(errors="replace").strip()[-300:] for path in sorted(self.log.rglob("err")))


def _in_own_session(argv: list[str], folder: Path, variables: Mapping[str, str]) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a campaign in the background may ignore it
    command.main(argv, folder, variables)


def _belongs(pid: int, mark: str, sessions: set[int | None]) -> bool:
    try:
        state, _, _, session = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[:4]
        marked = f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended
        return False
    return state != "Z" and (int(session) in sessions or marked)


def kill(pids: Sequence[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # it has ended just now
            continue


class Campaign:
    def __init__(self, scratch: Path, report: Report, rng: random.Random) -> None:
        self._scratch, self._report, self._rng = scratch, report, rng
        self._model = save_tiny_checkpoint(scratch / "model")

    def attack(self, group: Group, count: int) -> None:
        """Kill `count` times, in as many chains as that takes, after two runs that nobody kills."""
        plain = [self._scratch / f"{group.name} {i}" for i in range(2)]
        for folder in plain:
            run = self._start(group, folder)
            codes, seconds = run.wait(RUN_TIMEOUT), time.monotonic() - run.begin
            assert set(codes) == {0}, f"{group.name}: {codes} {run.error()}"
        reference = results(plain[0])
        self._report.add(f"{group.name}, not killed", difference(plain[1], reference))
        killed = 0
        for chain in itertools.count():
            if killed >= count:
                break
            folder = self._scratch / f"{group.name} chain {chain}"
            killed += self._chain(group, folder, min(MAX_KILLS, count - killed), seconds, reference)
            shutil.rmtree(folder, ignore_errors=True)

    def _chain(self, group: Group, folder: Path, most: int, seconds: float, reference: Mapping[str, Any]) -> int:
        killed = 0
        while True:
            run = self._start(group, folder)
            if killed >= most or not self._reaches_moment(run, group, folder, seconds):
                break
            moment = round(time.monotonic() - run.begin, 2)
            kill(self._victims(run, group))
            killed += 1
            self._report.add(group.name, run.orphans(45.0 if group.num_ranks > 1 else 15.0), seconds=moment)
        codes = run.wait(RUN_TIMEOUT)
        failure = run.orphans(15.0) or (None if set(codes) == {0} else f"ended with {codes}: {run.error()}")
        self._report.add(f"{group.name}, end of a chain", failure or difference(folder, reference), kills=killed)
        return killed

    def _reaches_moment(self, run: Run, group: Group, folder: Path, seconds: float) -> bool:
        if group.aim is None:
            moment = run.begin + self._rng.uniform(0.0, seconds)
            return run.wait_until(lambda: time.monotonic() >= moment)
        for _ in range(1 if group.aim == EXPORT else self._rng.randint(1, 3)):  # e.g. the third checkpoint
            for awaited in (False, True):
                if not run.wait_until(lambda awaited=awaited: any(folder.glob(group.aim or "")) == awaited):
                    return False
        time.sleep(self._rng.uniform(0.0, 0.05))
        return run.is_alive()

    def _victims(self, run: Run, group: Group) -> list[int]:
        if group.victim == "launcher":
            return [run.processes[0].pid or 0]
        return [self._rng.choice(run.processes).pid or 0] if group.victim == "rank" else run.pids()

    def _start(self, group: Group, folder: Path) -> Run:
        argv = ["--hf-checkpoint", str(self._model), "--output-dir", str(folder), *TINY]
        return Run(group, argv, self._scratch / "logs")


def results(folder: Path) -> dict[str, Any]:
    """Return what a run has left that must be the same in equal runs, by name."""
    metrics = [{k: v for k, v in row.items() if not k.startswith(_NOT_COMPARED)} for row in command.metrics_of(folder)]
    files = {path.name: path.read_bytes() for path in sorted((folder / "hf").glob("*")) if path.is_file()}
    return {
        **{f"metrics row {i}": row for i, row in enumerate(metrics)},
        **{f"samples row {i}": row for i, row in enumerate(command.rows_of(folder / "samples.jsonl"))},
        **{f"hf/{name}": hashlib.sha256(content).hexdigest() for name, content in files.items()},
    }


def difference(folder: Path, reference: Mapping[str, Any]) -> str | None:
    """Compare the results of a run bitwise with `reference`. Returns the first difference, or None."""
    try:
        now = results(folder)
    except (OSError, ValueError) as error:
        return f"results cannot be read: {type(error).__name__}: {error}"
    other = [name for name in sorted(now.keys() | reference.keys()) if now.get(name) != reference.get(name)]
    return f"{other[0]} is {now.get(other[0])!s:.100} and not {reference.get(other[0])!s:.100}" if other else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=[group.name for group in GROUPS])
    parser.add_argument("--json", type=Path, help="path of the report")
    options = parser.parse_args()
    report = Report(" ".join((__doc__ or "").split("\n\n")[1].split()), options.json)
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        campaign = Campaign(Path(name), report, random.Random(options.seed))
        for group in GROUPS:
            if options.only is None or group.name in options.only:
                campaign.attack(group, max(1, round(group.share * options.count / 200)))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
