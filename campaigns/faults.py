"""Faults of the machine: full and slow disks, a clock that jumps, stopped ranks, signals, a cut cable.

Law: under a fault the run either goes on and is right: its metrics, samples and exported files are, bit by bit, those
of a run without it. Or it ends with an exit code other than 0 and at most three lines per rank, which name the cause.
It never hangs, leaves no process behind, and no broken file that a later start trusts: once the fault is gone, the same
command goes on and is right. Each fault in each phase is a row. Groups:

- disk full: the output folder is on a file system of so many KiB (tmpfs; needs the right to mount), which is enlarged
  for the second start,
- slow disk, clock jumps: a library that is preloaded into the command (disturb.c; needs cc),
- SIGSTOP of a rank for 10 s, and for longer than --dist-timeout,
- SIGTERM, SIGINT, and SIGTERM twice, in each phase,
- cut cable between two ranks (network namespaces), for 3 s and for good,
- disk full for the weight files of a vLLM server (--servers PYTHON, of the environment with vLLM).

    python -m campaigns.faults --seed 0
"""

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from campaigns.processes import MARK, survivors
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
from tests.e2e.two_hosts import ADDRESSES, two_hosts
from tests.testing import rank_variables, save_tiny_checkpoint

Disturb = Callable[[Run, Path], str | None]  # while the run goes on; returns what did not hold
TWO = ["--nproc-per-node", "2"]
FULL = "No space left on device"
MAX_LINES = 3


@dataclass(frozen=True)
class Case:
    fault: str
    phase: str
    disturb: Disturb
    argv: Sequence[str] = ()
    num_ranks: int = 1
    variables: Mapping[str, str] | None = None  # of the first start only
    cause: str = ""  # in the lines of a run that ends
    must_go_on: bool = False
    codes: tuple[int, ...] = ()  # of a run that ends; empty: any
    disk_kib: int | None = None  # size of the file system
    disk_holds: str = "run"  # or "weights": those for the server


def nothing(run: Run, folder: Path) -> None:
    """Let the run go on."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--servers", metavar="PYTHON", help="of the environment with vLLM")
    parser.add_argument("--only", nargs="+", help="names of faults")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    report = Report("faults", " ".join((__doc__ or "").split()))
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        scratch = Path(name)
        cases = [*stop_cases(), *signal_cases(rng)]
        if library := build_library(scratch):
            os.environ["LD_PRELOAD"] = library
            cases += preload_cases()
        cases += disk_cases(scratch)
        if options.servers:
            cases += server_cases(os.path.abspath(options.servers))
        cases = [case for case in cases if options.only is None or case.fault in options.only]
        campaign = Campaign(scratch, report)
        for layout in sorted({_layout(case) for case in cases} | {"two ranks"}):
            campaign.measure(layout, next((case for case in cases if _layout(case) == layout), TWO_RANKS))
        if options.only is None or "cut cable" in options.only:
            campaign.cut_cable()
        with ThreadPoolExecutor(2) as workers:
            list(workers.map(campaign.run, cases))
    return report.finish()


TWO_RANKS = Case("none", "none", nothing, num_ranks=2)


def _layout(case: Case) -> str:
    """Name the runs that have equal results."""
    if "vllm-server" in case.argv:
        return "vLLM server"
    if "--no-export" in case.argv:
        return "metrics only"
    return "two ranks" if case.num_ranks == 2 or "--nproc-per-node" in case.argv else "one process"


def disk_cases(scratch: Path) -> Iterator[Case]:
    """Sizes at which everything that a run writes meets the full disk."""
    if not _may_mount(scratch):
        print("skipped: disk full: mounting is not permitted here")
        return
    bare = ["--keep-last", "0", "--no-export"]  # only config.yaml, metrics, samples and timeline: pages of 4 KiB
    for kib in (4, 12, 16, 20, 24, 28, 32, 40):
        yield Case("disk full", f"{kib} KiB, metrics only", nothing, bare, cause=FULL, disk_kib=kib)
    for kib in (64, 200, 420):
        yield Case("disk full", f"{kib} KiB, export", nothing, bare[:2], cause=FULL, disk_kib=kib)
    for kib in (256, 512, 1024, 1400, 2048, 2600, 3072, 3600, 4096, 4600, 5120):
        yield Case("disk full", f"{kib} KiB", nothing, cause=FULL, disk_kib=kib)
    for kib in (512, 1400, 2600, 3600):
        yield Case("disk full", f"{kib} KiB, async save", nothing, ["--async-save"], cause=FULL, disk_kib=kib)
    for kib in (20, 512, 2600, 4096):
        yield Case("disk full", f"{kib} KiB, two ranks", nothing, num_ranks=2, cause=FULL, disk_kib=kib)
    for kib in (512, 2600):
        yield Case("disk full", f"{kib} KiB, launcher", nothing, TWO, cause=FULL, disk_kib=kib)


def preload_cases() -> Iterator[Case]:
    slow, jumps = {"CAMPAIGN_SLOW_DISK": "1"}, {"CAMPAIGN_CLOCK": "1"}
    for fault, variables in (("slow disk", slow), ("clock jumps", jumps)):
        for phase, argv, ranks in (
            ("one process", [], 1),
            ("async save", ["--async-save"], 1),
            ("two ranks", [], 2),
            ("two ranks, async save", ["--async-save"], 2),
            ("launcher", TWO, 1),
        ):
            yield Case(fault, phase, nothing, argv, num_ranks=ranks, variables=variables, must_go_on=True)


def server_cases(python: str) -> Iterator[Case]:
    argv = ["--rollout-engine", "vllm-server", "--rollout-num-servers", "1", "--rollout-kv-cache-gib", "0.05"]
    argv += ["--rollout-server-python", python, "--max-tokens-per-gpu", "1024"]
    for kib in (64, 400):
        yield Case(
            "disk full", f"{kib} KiB, weights for a server", nothing, argv, cause=FULL, disk_kib=kib,
            disk_holds="weights",
        )  # fmt: skip


def signal_cases(rng: random.Random) -> Iterator[Case]:
    for name, signals, codes in (  # docs/launch.md; without a launcher SIGTERM is not handled
        ("SIGTERM", [signal.SIGTERM], (-15, 143)),
        ("SIGINT", [signal.SIGINT], (130,)),
        ("SIGTERM twice", [signal.SIGTERM] * 2, (-15, 143)),
    ):
        for phase, pattern, argv in (
            ("checkpoint", CHECKPOINT, []),
            ("async checkpoint", CHECKPOINT, ["--async-save"]),
            ("export", EXPORT, []),
            ("weight sync", WEIGHT_SYNC, SIGNALLING),
            ("checkpoint, launcher", CHECKPOINT, TWO),
        ):
            yield Case(name, phase, _send(signals, after=pattern, delay=rng.uniform(0.0, 0.03)), argv, codes=codes)
        for low, high, argv in ((0.0, 0.7, []), (0.7, 2.0, []), (2.0, 4.0, []), (0.0, 9.0, TWO)):
            moment, where = rng.uniform(low, high), ", launcher" if argv else ""
            yield Case(name, f"at {moment:.1f} s{where}", _send(signals, delay=moment), argv, codes=codes)
    interrupt = _send([signal.SIGINT], after=CHECKPOINT, delay=0.02, to_all=True)
    yield Case("SIGINT", "checkpoint, launcher and ranks as by Ctrl-C", interrupt, TWO, codes=(130,))


def _send(signals: Sequence[int], *, after: str | None = None, delay: float, to_all: bool = False) -> Disturb:
    def disturb(run: Run, folder: Path) -> None:
        if after is not None and not wait_for(after, folder, run, number=1 if after == EXPORT else 2):
            return
        time.sleep(delay)
        for number in signals:
            for pid in run.pids() if to_all else [process.pid for process in run.processes]:
                _signal(pid or 0, number)
            time.sleep(0.05)

    return disturb


def stop_cases() -> Iterator[Case]:
    for rank in (0, 1):
        for phase, pattern in (("start", "metrics.jsonl"), ("rollout", None), ("checkpoint", CHECKPOINT)):
            where = f"rank {rank}, {phase}"
            yield Case("SIGSTOP for 10 s", where, _stop(rank, pattern, 10.0), num_ranks=2, must_go_on=True)
            short, cause = ["--dist-timeout", "15"], "rank|timeout|[Tt]imed out"
            yield Case("SIGSTOP for good", where, _stop(rank, pattern), short, num_ranks=2, cause=cause)


def _stop(rank: int, pattern: str | None, seconds: float | None = None) -> Disturb:
    """Stop a rank for `seconds`; without, until the other has ended, which then kills the stopped one."""

    def disturb(run: Run, folder: Path) -> str | None:
        if not wait_until(lambda: any(folder.glob(pattern)) if pattern else steps_done(folder) > 1, run):
            return "ended before it was stopped"
        stopped, other = run.processes[rank], run.processes[1 - rank]
        _signal(stopped.pid or 0, signal.SIGSTOP)
        if seconds is not None:
            time.sleep(seconds)
            _signal(stopped.pid or 0, signal.SIGCONT)
            return None
        other.join(60)  # --dist-timeout is 15 s
        failure = "the other rank is alive 60 s later, with --dist-timeout 15" if other.is_alive() else None
        stopped.kill()
        return failure

    return disturb


class Campaign:
    def __init__(self, scratch: Path, report: Report) -> None:
        self._scratch = scratch
        self._report = report
        self._lock = threading.Lock()
        self._model = save_tiny_checkpoint(scratch / "model", head_dim=32)
        self._references: dict[str, dict[str, Any]] = {}
        self._usual: set[str] = set()  # lines that runs without a fault write

    def measure(self, layout: str, case: Case) -> None:
        """Run without the fault, and then again with nothing to do, for results and lines."""
        folder = self._scratch / layout.replace(" ", "_")
        for _ in range(2):
            run = self._start(case, folder, folder, None)
            codes = run.wait(RUN_TIMEOUT)
            run.orphans()
            assert set(codes) == {0}, f"{layout}: {codes} {run.error()}"
            self._usual |= {_without_numbers(line) for line in run.error().splitlines()}
        self._references[layout] = results(folder)

    def run(self, case: Case) -> None:
        """Run with the fault, then without it if it has ended the run."""
        home = Path(tempfile.mkdtemp(dir=self._scratch))
        begin = time.monotonic()
        with _disk(home / "disk", case.disk_kib) as enlarge:
            folder = home / "disk" / "run" if case.disk_kib and case.disk_holds == "run" else home / "run"
            run = self._start(case, folder, home, case.variables)
            failure = case.disturb(run, folder)
            codes = run.wait(RUN_TIMEOUT)
            seconds = round(time.monotonic() - begin, 1)
            steps = steps_done(folder)
            lines = [line for line in run.error().splitlines() if _without_numbers(line) not in self._usual]
            failure = failure or self._verdict(case, codes, lines) or run.orphans()
            run.orphans(0.0)
            enlarge()
            if set(codes) == {0}:
                failure = failure or difference(folder, self._references[_layout(case)])
            else:
                failure = failure or self._again(case, folder, home)
        said = plain("\n".join(lines), home, 200)
        self._add(case.fault, failure, phase=case.phase, ended=codes, steps=steps, seconds=seconds, said=said)
        shutil.rmtree(home, ignore_errors=True)

    def _verdict(self, case: Case, codes: Sequence[int | None], lines: Sequence[str]) -> str | None:
        if None in codes:
            return f"hangs: {codes}"
        if set(codes) == {0}:
            return None
        if case.must_go_on or 0 in codes:
            return f"ended with {codes}: {plain(' / '.join(lines), self._scratch)}"
        if case.codes and not {*codes} <= {*case.codes}:
            return f"ended with {codes} and not with one of {case.codes}: {plain(' / '.join(lines), self._scratch)}"
        if len(lines) > MAX_LINES * len(codes):
            return f"{len(lines)} lines: {plain(' / '.join(lines), self._scratch)}"
        if not re.search(case.cause, " ".join(lines)):
            return f"does not name the cause: {plain(' / '.join(lines), self._scratch)}"
        return None

    def _again(self, case: Case, folder: Path, home: Path) -> str | None:
        run = self._start(case, folder, home, None)
        codes = run.wait(RUN_TIMEOUT)
        failure = run.orphans()
        if set(codes) != {0}:
            return f"the second start ended with {codes}: {plain(run.error(), home)}"
        return failure or difference(folder, self._references[_layout(case)])

    def _start(self, case: Case, folder: Path, home: Path, variables: Mapping[str, str] | None) -> Run:
        argv = ["--hf-checkpoint", str(self._model), "--output-dir", str(folder), *TINY]
        argv = [*(_without_saving(argv) if "--keep-last" in case.argv else argv), *case.argv]
        if case.disk_holds == "weights":
            argv += ["--weight-sync-dir", str(home / "disk")]
        return start(argv, folder, self._scratch / "logs", num_ranks=case.num_ranks, variables=variables)

    def cut_cable(self) -> None:
        """Two ranks on two hosts, without an agent."""
        try:
            with two_hosts() as hosts:
                for seconds in (3.0, None):
                    folder = self._scratch / f"cut_{seconds}"
                    argv = ["fsdptrain", "--hf-checkpoint", str(self._model), "--output-dir", str(folder), *TINY]
                    argv += ["--dist-timeout", "30"]
                    codes, lines, failure = self._on_hosts(hosts, argv, folder, seconds)
                    if set(codes) == {0}:
                        failure = failure or difference(folder, self._references["two ranks"])
                    else:
                        case = Case("cut cable", "", nothing, cause="rank|timeout|[Tt]imed out", num_ranks=2)
                        failure = failure or self._verdict(case, codes, lines)
                        hosts.mend()
                        again, more, _ = self._on_hosts(hosts, argv, folder, 0.0)
                        ended = (
                            None if set(again) == {0} else f"second start: {again} {plain(' / '.join(more), folder)}"
                        )
                        failure = failure or ended or difference(folder, self._references["two ranks"])
                    phase = f"for {seconds:g} s" if seconds else "for good"
                    said = plain(" / ".join(lines), self._scratch, 200)
                    self._add("cut cable", failure, phase=phase, ended=codes, said=said)
        except pytest.skip.Exception as reason:
            print(f"skipped: cut cable: {reason}")

    def _on_hosts(
        self, hosts: Any, argv: Sequence[str], folder: Path, cut_s: float | None
    ) -> tuple[list[int | None], list[str], str | None]:
        """Run on both hosts; cut the cable in the third rollout. None: do not mend it."""
        mark = f"hosts-{cut_s}"
        variables = [rank_variables(rank, 2, 29511) | {"MASTER_ADDR": ADDRESSES[0], MARK: mark} for rank in (0, 1)]
        for one in variables:
            one |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        ranks = [hosts.start(host, argv, variables[host]) for host in (0, 1)]
        if cut_s != 0.0:
            while steps_done(folder) < 2 and all(rank.poll() is None for rank in ranks):
                time.sleep(0.01)
            hosts.cut()
        if cut_s:
            time.sleep(cut_s)
            hosts.mend()
        deadline, failure = time.monotonic() + 120, None
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.1)
        codes = [rank.poll() for rank in ranks]
        for rank in ranks:
            rank.kill()
        if left := survivors(mark):
            failure = f"left alive: {left}"
        lines = [line for rank in ranks for line in rank.communicate()[1].splitlines()]
        return codes, [line for line in lines if _without_numbers(line) not in self._usual], failure

    def _add(self, group: str, failure: str | None, **details: Any) -> None:
        with self._lock:
            self._report.add(group, failure, **details)


def _without_saving(argv: Sequence[str]) -> list[str]:
    at = [*argv].index("--save-interval")
    return [*argv[:at], *argv[at + 2 :]]


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:  # it has ended just now
        return


def _without_numbers(line: str) -> str:
    return re.sub(r"[\d.e+-]+", "0", line).replace("ranks", "rank")


@contextmanager
def _disk(path: Path, kib: int | None) -> Iterator[Callable[[], None]]:
    """Mount a file system of `kib` at `path`, and yield a function that enlarges it."""
    if kib is None:
        yield lambda: None
        return
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(path)], check=True)
    try:
        yield lambda: subprocess.run(["mount", "-o", "remount,size=256m", str(path)], check=True) and None
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def _may_mount(scratch: Path) -> bool:
    try:
        with _disk(scratch / "probe", 4):
            return True
    except (subprocess.CalledProcessError, OSError):
        return False


def build_library(scratch: Path) -> str | None:
    """Compile disturb.c."""
    if shutil.which("cc") is None:
        print("skipped: slow disk, clock jumps: there is no C compiler")
        return None
    library = scratch / "disturb.so"
    source = Path(__file__).with_name("disturb.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
    return str(library)


if __name__ == "__main__":
    sys.exit(main())
