"""SIGKILL at random moments, then the same command again.

Law: a run that is killed at any moment, and started again with the same command as often as needed, ends with the same
metrics (except times, speed, memory), samples and exported files, bit by bit, as a run that nobody killed. And no
process of a killed run is alive 15 s later; where ranks have no agent, --dist-timeout (30 s) later.

A chain is a run that is killed, started again, killed again, ... until it ends before its next kill, or was killed
eight times; then its results are compared. Each kill is a row; so is the end of each chain. Groups:

- one process, killed at a moment drawn uniformly from the time that a whole run takes; or 0 to 50 ms after a
  checkpoint, a checkpoint with --async-save, the export or a weight sync has begun,
- two ranks without an agent: rank 0 or 1 is killed, and the other must end by itself,
- two ranks by --nproc-per-node 2: the launcher, one rank, or everything is killed, at any moment or in a checkpoint,
- one process with a vLLM server (--servers PYTHON, of the environment with vLLM): all of it is killed.

    python -m campaigns.kills --count 200 --seed 0
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from campaigns.processes import command_of
from campaigns.report import Report
from campaigns.runs import (
    CHECKPOINT,
    EXPORT,
    RUN_TIMEOUT,
    SIGNALLING,
    TINY,
    WEIGHT_SYNC,
    Run,
    difference,
    plain,
    results,
    start,
    steps_done,
    wait_for,
    wait_until,
)
from tests.testing import save_tiny_checkpoint

MAX_KILLS = 8  # in a chain


@dataclass(frozen=True)
class Group:
    name: str
    share: int  # of 200 kills
    argv: Sequence[str] = ()
    num_ranks: int = 1
    aim: str | None = None  # a pattern of names in the output folder: kill after one has appeared
    victim: str = "all"  # or "rank", "launcher"
    reference: str = "one process"  # the first group with this one is run without kills: for results, and how long


TWO = ["--nproc-per-node", "2"]
GROUPS = [
    Group("one process", 60),
    Group("checkpoint", 30, aim=CHECKPOINT),
    Group("async checkpoint", 25, ["--async-save"], aim=CHECKPOINT),
    Group("export", 20, aim=EXPORT),
    Group("weight sync", 20, SIGNALLING, aim=WEIGHT_SYNC),
    Group("one of two ranks", 20, ["--dist-timeout", "30"], num_ranks=2, victim="rank", reference="two ranks"),
    Group("launcher", 5, TWO, victim="launcher", reference="launcher"),
    Group("launcher, checkpoint", 4, TWO, aim=CHECKPOINT, victim="launcher", reference="launcher"),
    Group("rank of a launcher", 4, TWO, victim="rank", reference="launcher"),
    Group("rank of a launcher, checkpoint", 4, TWO, aim=CHECKPOINT, victim="rank", reference="launcher"),
    Group("launcher and ranks", 4, TWO, reference="launcher"),
    Group("launcher and ranks, checkpoint", 4, TWO, aim=CHECKPOINT, reference="launcher"),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--servers", metavar="PYTHON", help="of the environment with vLLM: adds 6 kills")
    parser.add_argument("--only", nargs="+", help="names of groups")
    options = parser.parse_args()
    groups = [group for group in GROUPS if options.only is None or group.name in options.only]
    counts = [max(1, round(group.share * options.count / 200)) for group in groups]
    if options.servers:
        argv = ["--rollout-engine", "vllm-server", "--rollout-num-servers", "1", "--rollout-kv-cache-gib", "0.05"]
        argv += ["--rollout-server-python", os.path.abspath(options.servers), "--max-tokens-per-gpu", "1024"]
        groups, counts = [*groups, Group("vLLM server", 6, argv, reference="vLLM server")], [*counts, 6]
    report = Report("kills", " ".join((__doc__ or "").split()))
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        campaign = Campaign(Path(name), report)
        for reference in sorted({group.reference for group in groups}):
            campaign.measure(reference, next(group for group in groups if group.reference == reference))
        with ThreadPoolExecutor(2) as workers:
            seeds = [f"{options.seed} {group.name}" for group in groups]
            list(workers.map(campaign.attack, groups, counts, map(random.Random, seeds)))
    return report.finish()


class Campaign:
    def __init__(self, scratch: Path, report: Report) -> None:
        self._scratch = scratch
        self._report = report
        self._lock = threading.Lock()  # of the report
        self._model = save_tiny_checkpoint(scratch / "model", head_dim=32)  # the least that vLLM takes
        self._references: dict[str, dict[str, Any]] = {}
        self._seconds: dict[str, float] = {}

    def measure(self, name: str, group: Group) -> None:
        """Run to the end without a kill, twice: the second time shows that results are repeated bitwise."""
        for attempt in range(2):
            folder = self._scratch / f"{name} {attempt}"
            run = self._start(group, folder)
            codes = run.wait(RUN_TIMEOUT)
            self._seconds[name] = 1.5 * (time.monotonic() - run.begin)  # later, two share the cores
            assert set(codes) == {0}, f"{name}: {codes} {run.error()}"
            if attempt == 0:
                self._references[name] = results(folder)
            else:
                self._add(f"{name}, not killed", difference(folder, self._references[name]))

    def attack(self, group: Group, count: int, rng: random.Random) -> None:
        """Kill `count` times, in as many chains as that takes."""
        killed = chains = 0
        while killed < count:
            folder = self._scratch / f"{group.name} chain {chains}".replace(" ", "_")
            killed += self._chain(group, folder, min(MAX_KILLS, count - killed), rng)
            chains += 1
            shutil.rmtree(folder, ignore_errors=True)

    def _chain(self, group: Group, folder: Path, most: int, rng: random.Random) -> int:
        killed = 0
        while True:
            run = self._start(group, folder)
            wait = self._aim(group, folder, rng, run) if killed < most else lambda: False
            if not wait() or not run.is_alive():
                break
            moment, step, at = round(time.monotonic() - run.begin, 2), steps_done(folder), _unfinished(folder)
            _kill(run, group, rng)
            killed, begin = killed + 1, time.monotonic()
            left = run.orphans(45.0 if group.num_ranks > 1 else 15.0)
            gone = round(time.monotonic() - begin, 1)
            self._add(group.name, left, seconds=moment, steps=step, gone_s=gone, **({"unfinished": at} if at else {}))
        codes = run.wait(RUN_TIMEOUT)
        left = run.orphans()
        failure = left or (None if set(codes) == {0} else f"ended with {codes}: {plain(run.error(), self._scratch)}")
        failure = failure or difference(folder, self._references[group.reference])
        self._add(f"{group.name}, end of a chain", failure, kills=killed)
        return killed

    def _aim(self, group: Group, folder: Path, rng: random.Random, run: Run) -> Callable[[], bool]:
        """Return a function that waits for the moment, and returns whether the run has reached it."""
        if group.aim is None:
            moment = run.begin + rng.uniform(0.0, self._seconds[group.reference])
            return lambda: wait_until(lambda: time.monotonic() >= moment, run)
        number = 1 if group.aim == EXPORT else rng.randint(1, 3)  # e.g. the third checkpoint of this start
        delay, pattern = rng.uniform(0.0, 0.05), group.aim
        return lambda: wait_for(pattern, folder, run, number=number) and time.sleep(delay) is None and run.is_alive()

    def _start(self, group: Group, folder: Path) -> Run:
        argv = ["--hf-checkpoint", str(self._model), "--output-dir", str(folder), *TINY, *group.argv]
        return start(argv, folder, self._scratch / "logs", num_ranks=group.num_ranks)

    def _add(self, group: str, failure: str | None, **details: Any) -> None:
        with self._lock:
            self._report.add(group, failure, **details)


def _unfinished(folder: Path) -> str:
    """Return which temporary folders of the run exist."""
    paths = [*folder.glob("checkpoints/.*-step*"), *folder.glob(".fsdptrain-*"), *folder.glob(".*.half")]
    return " ".join(sorted(path.name for path in paths))


def _kill(run: Run, group: Group, rng: random.Random) -> None:
    pids = run.pids()
    if group.victim == "launcher":
        pids = [run.processes[0].pid or 0]
    elif group.victim == "rank" and group.num_ranks > 1:
        pids = [rng.choice(run.processes).pid or 0]
    elif group.victim == "rank":  # of the launcher, if it has started them
        ranks = [pid for pid in pids if pid != run.processes[0].pid and "-m fsdptrain" in command_of(pid)]
        pids = [rng.choice(ranks)] if ranks else pids
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # it has ended just now
            continue


if __name__ == "__main__":
    sys.exit(main())
