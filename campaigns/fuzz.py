"""Random options and random bytes, by Hypothesis: each is accepted, or refused in one line.

Laws. Options: any recipe or command line is refused with an FsdptrainError of one line before a model is loaded, or the
configuration is valid; a valid one trains a tiny model for one step, or ends with exit code 2 and one line. Bytes: a
reader of the package returns, or raises FsdptrainError (of a server: ServerError) with one line. It opens no file
outside of its folder, takes at most 5 s of processor time, and allocates at most 4 GiB.

    python -m campaigns.fuzz [--examples 2000] [--seed 0] [--only TARGET ...]

Each target runs in a process of its own, so that a crash or a hang is a row too. A failure is shrunk to a small
example, recorded with the place that raised, and then ignored, to find the next one.
"""

import argparse
import json
import os
import re
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from campaigns.fuzzing.failures import place_of
from campaigns.fuzzing.options import in_one, small_runs
from campaigns.fuzzing.targets import TARGETS
from campaigns.report import Report
from tests.e2e import command
from tests.testing import preloaded_context, save_tiny_checkpoint

TARGET_S = 900.0  # for all examples of a target
RUN_S = 90.0
MOST_MEMORY = 4 << 30
ROUNDS = 12  # distinct failures per target
RUNS = 150 / 2000  # per example
REFUSED = "refused: "


@dataclass(frozen=True)
class Failure:
    error: str  # class and message, one line
    place: str  # file:line of the package
    example: str


def attack(name: str, examples: int, number: int, folder: Path) -> None:
    """Run one target in this process. Writes {"examples": n, "failures": [...]} to folder/found.json."""
    target = TARGETS[name](folder)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_MEMORY, resource.RLIM_INFINITY))
    known: set[tuple[str, str]] = set()
    failures: list[Failure] = []
    count = 0

    def check(value: Any) -> None:
        nonlocal count
        count += 1
        try:
            target.check(value)
        except Exception as error:
            if place_of(error) not in known:
                last[:] = [value, error]
                raise

    last: list[Any] = []
    for _ in range(ROUNDS):
        try:
            _run(check, target.values, max(10, int(examples * target.share)), number)
        except BaseException as error:
            if not last:
                raise
            value, cause = last
            kind, place = place_of(cause)
            known.add((kind, place))
            message = " ".join(str(cause).split())[:160] if isinstance(error, Exception) else repr(error)
            failures.append(Failure(f"{kind}: {message}", place, repr(value)[:300]))
            last.clear()
        else:
            break
    found = {"examples": count, "failures": [vars(failure) for failure in failures]}
    (folder / "found.json").write_text(json.dumps(found).replace(str(folder), "<tmp>"))


def _run(check: Callable[[Any], None], values: st.SearchStrategy[Any], examples: int, number: int) -> None:
    options = settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )
    seed(number)(options(given(values)(check)))()


def isolated(name: str, examples: int, number: int, folder: Path) -> tuple[int, list[dict[str, str]]]:
    """Run `attack` in a new process. A process that dies or hangs is a failure."""
    folder.mkdir()
    process = preloaded_context().Process(target=_quiet, args=(name, examples, number, folder))
    process.start()
    process.join(TARGET_S)
    code = process.exitcode
    process.kill()
    process.join()
    if code == 0:
        found = json.loads((folder / "found.json").read_text())
        return found["examples"], found["failures"]
    reason = f"did not end in {TARGET_S:.0f} s" if code is None else f"the process ended with {code}"
    log = (folder / "log").read_text(errors="replace").strip().splitlines()
    example = (folder / "last").read_text() if (folder / "last").exists() else ""
    return 0, [{"error": reason, "place": (log or [""])[-1][:160].replace(str(folder), "<tmp>"), "example": example}]


def _quiet(name: str, examples: int, number: int, folder: Path) -> None:
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        attack(name, examples, number, folder)
    except BaseException:
        traceback.print_exc()
        raise


def train_once(options: list[str], folder: Path, checkpoint: Path) -> str:
    """Run one step with these options. Returns what broke the law, or "", or `refused: ` and the line."""
    argv = ["--hf-checkpoint", str(checkpoint), "--output-dir", str(folder / "run"), *command.TINY_RUN]
    process = command.start([*argv, "--num-rollout", "1", *options], folder)
    process.join(RUN_S)
    code = process.exitcode
    process.kill()
    process.join()
    err = (folder / "err").read_text(errors="replace")
    shutil.rmtree(folder)
    errors = [line for line in err.splitlines() if line.startswith("fsdptrain: ")]
    if code is None:
        return f"did not end in {RUN_S:.0f} s"
    if "Traceback" in err or code not in (0, 2):
        return f"exit code {code}: {(err.strip().splitlines() or [''])[-1][:160]}"
    if code == 2 and not (len(errors) == 1 and err.strip().splitlines()[-1] == errors[0]):
        return f"{len(errors)} lines of errors"
    return f"{REFUSED}{re.sub(r'[0-9][0-9.e+-]*', '#', errors[0])[:160]}" if code else ""


def shrink(options: list[list[str]], fails: Callable[[list[list[str]]], bool]) -> list[list[str]]:
    """Leave options out while the run still fails."""
    for option in list(options):
        fewer = [other for other in options if other is not option]
        if fails(fewer):
            options = fewer
    return options


def train_many(report: Report, count: int, number: int, root: Path) -> None:
    """Train one step with `count` valid configurations, and report the failures."""
    checkpoint = save_tiny_checkpoint(root / "model")
    drawn: list[list[list[str]]] = []

    def again(options: list[list[str]]) -> str:
        return train_once(in_one(options), root / "again", checkpoint)

    _run(lambda options: drawn.append(options), small_runs(str(checkpoint)), 3 * count, number)
    chosen = [list(options) for options in dict.fromkeys(tuple(map(tuple, options)) for options in drawn) if options]
    refused, seen = Counter[str](), dict[str, str]()
    for i, options in enumerate(chosen[:count]):
        words = [list(option) for option in options]
        outcome = train_once(in_one(words), root / f"run{i}", checkpoint)
        if outcome.startswith(REFUSED):
            refused[outcome.removeprefix(REFUSED).replace(str(root), "<tmp>")] += 1
        elif outcome and outcome not in seen:
            seen[outcome] = " ".join(in_one(shrink(words, lambda few: again(few) == outcome)))  # noqa: B023
    for outcome, example in seen.items():
        report.add("one step", outcome.replace(str(root), "<tmp>"), target="failure", example=example)
    report.add(
        "one step",
        None,
        target="all",
        examples=min(count, len(chosen)),
        refused=sum(refused.values()),
        refusals=dict(refused),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--examples", type=int, default=2000, help="per target; slow targets try fewer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[*TARGETS, "train"])
    args = parser.parse_args()
    name = "fuzz" if set(args.only) == {*TARGETS, "train"} else f"chosen_{os.getpid()}"
    report = Report(name, (__doc__ or "").split("\n\n")[1])
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        root = Path(folder)
        os.environ.update(HF_HOME=str(root / "hub"), HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", OMP_NUM_THREADS="1")
        os.environ["TRANSFORMERS_VERBOSITY"] = "error"
        for target in (target for target in TARGETS if target in args.only):
            start = time.monotonic()
            count, failures = isolated(target, args.examples, args.seed, root / target)
            for failure in failures:
                report.add(target, f"{failure['error']} ({failure['place']})", example=failure["example"])
            report.add(target, None, examples=count, seconds=round(time.monotonic() - start))
        if "train" in args.only:
            train_many(report, max(1, int(args.examples * RUNS)), args.seed, root)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
