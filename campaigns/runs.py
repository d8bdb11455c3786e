"""Tiny runs of the real command line for campaigns: start one, know its processes, compare what two have left."""

import hashlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from campaigns.processes import MARK, processes_of, survivors
from fsdptrain.config import Config
from fsdptrain.rollout.embedded.engine import HFEngine, build_hf_engine
from tests.e2e import command
from tests.testing import PRELOAD, free_port, preloaded_context, rank_variables

os.environ.setdefault(PRELOAD, "tests.preloaded")
_numbers = itertools.count()
# 0.7 s to start, 6 rollouts of 4 optimizer steps in 0.3 s each, a checkpoint after each
TINY = [
    *command.TINY_RUN,
    *("--num-rollout", "6", "--steps-per-rollout", "4", "--epochs-per-rollout", "2"),
    *("--save-interval", "1", "--eval-interval", "3"),
]
RUN_TIMEOUT = 180.0  # [s] for a run that nothing disturbs
# What begins is seen from outside by a file or folder of the run
CHECKPOINT, EXPORT, WEIGHT_SYNC = "checkpoints/.tmp-*", ".fsdptrain-*", "sync-began"
SIGNALLING = ["--rollout-engine", "campaigns.runs:signalling_engine"]  # needed for `WEIGHT_SYNC`
_SYNC_FILE = "CAMPAIGN_SYNC_FILE"  # environment variable
# Times, speed and memory. Weight syncs: a resumed run has one more, and metrics of the one before its first step only.
_NOT_COMPARED = ("perf/", "weight_sync/", "time")


@dataclass
class Run:
    """One start of the command, in sessions of its own. Several processes: ranks as torchrun starts them."""

    log: Path  # folder of the output of each process
    processes: list[ForkServerProcess]
    mark: str
    begin: float = field(default_factory=time.monotonic)

    def pids(self) -> list[int]:
        sessions = {process.pid for process in self.processes}
        return sorted({pid for session in sessions for pid in processes_of(self.mark, session)})

    def is_alive(self) -> bool:
        return any(process.is_alive() for process in self.processes)

    def wait(self, timeout: float) -> list[int | None]:
        """Return the exit codes; None for a process that has not ended in time."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process in self.processes]

    def orphans(self, patience_s: float = 15.0) -> str | None:
        """Wait until all processes have ended. Kills those that have not, and returns their command lines."""
        deadline = time.monotonic() + patience_s
        self.wait(patience_s)
        left = [
            line
            for process in self.processes
            for line in survivors(self.mark, process.pid, patience_s=deadline - time.monotonic())
        ]
        for pid in self.pids():
            os.kill(pid, 9)
        return f"left alive after {patience_s:g} s: {sorted(set(left))}" if left else None

    def error(self) -> str:
        """Return what the processes wrote to stderr, without the lines that every run writes."""
        return "\n".join(path.read_text(errors="replace").strip() for path in sorted(self.log.rglob("err"))).strip()


def signalling_engine(config: Config, **kwargs: Any) -> HFEngine:
    """Build the embedded engine. It touches a file before it takes new weights."""
    engine = build_hf_engine(config, **kwargs)
    update = engine.update_weights

    def update_weights(*args: Any) -> None:
        Path(os.environ[_SYNC_FILE]).touch()
        update(*args)

    engine.update_weights = update_weights
    return engine


def start(
    argv: Sequence[str], folder: Path, logs: Path, *, num_ranks: int = 1, variables: Mapping[str, str] | None = None
) -> Run:
    """Start `fsdptrain *argv`, on more than one rank as torchrun does. `folder` is the --output-dir in `argv`."""
    number = next(_numbers)
    log, mark = logs / f"log{number}", f"{os.getpid()}-{number}"
    (folder / WEIGHT_SYNC).unlink(missing_ok=True)
    port = free_port()
    processes: list[ForkServerProcess] = []
    for rank in range(num_ranks):
        more = {**(variables or {}), MARK: mark, _SYNC_FILE: str(folder / WEIGHT_SYNC)}
        more |= rank_variables(rank, num_ranks, port) if num_ranks > 1 else {}
        output = log / f"rank{rank}"
        output.mkdir(parents=True)
        process = preloaded_context().Process(target=_in_own_session, args=(list(argv), output, more))
        process.start()
        processes.append(process)
    return Run(log, processes, mark)


def _in_own_session(argv: list[str], folder: Path, variables: Mapping[str, str]) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a campaign in the background may ignore it
    command.main(argv, folder, variables)


def wait_until(done: Callable[[], object], run: Run) -> bool:
    """Return True once `done()` is true, False once the run has ended."""
    while run.is_alive():
        if done():
            return True
        time.sleep(0.0005)
    return False


def wait_for(pattern: str, folder: Path, run: Run, *, number: int = 1) -> bool:
    """Wait until what the pattern names has begun for the nth time since this call."""
    for _ in range(number):
        for awaited in (False, True):
            if not wait_until(lambda awaited=awaited: any(folder.glob(pattern)) == awaited, run):
                return False
        (folder / WEIGHT_SYNC).unlink(missing_ok=True)
    return True


def steps_done(folder: Path) -> int:
    """Return the rollouts in the metrics of a run that may be writing them."""
    path = folder / "metrics.jsonl"
    return sum(line.endswith("}\n") and '"loss/total"' in line for line in path.open()) if path.exists() else 0


def results(folder: Path) -> dict[str, Any]:
    """Return what a run has left that must be the same in equal runs, by name."""
    kept = [{k: v for k, v in row.items() if not k.startswith(_NOT_COMPARED)} for row in command.metrics_of(folder)]
    files = {path.name: path.read_bytes() for path in sorted((folder / "hf").glob("*")) if path.is_file()}
    return {
        **{f"metrics row {i}": row for i, row in enumerate(kept)},
        **{f"samples row {i}": row for i, row in enumerate(command.rows_of(folder / "samples.jsonl"))},
        **{f"hf/{name}": hashlib.sha256(content).hexdigest() for name, content in files.items()},
    }


def difference(folder: Path, reference: Mapping[str, Any]) -> str | None:
    """Compare the results of a run bitwise with `reference`. Returns the first difference, or None."""
    try:
        found = results(folder)
    except (OSError, ValueError) as error:
        return f"results cannot be read: {type(error).__name__}: {error}".replace(str(folder), "RUN")
    for name in sorted(found.keys() | reference.keys()):
        if found.get(name) != reference.get(name):
            return f"{name} is {_short(found.get(name))} and not {_short(reference.get(name))}"
    return None


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) < 100 else f"{text[:100]}..."


def plain(text: str, scratch: Path, limit: int = 300) -> str:
    """Return `text` without the paths of this machine, in one line."""
    text = text.replace(str(scratch), "SCRATCH").replace(str(Path(__file__).parents[1]), "REPO")
    return " / ".join(text.splitlines())[:limit]
