"""Bad inputs of every kind, one command each: each is refused in one line that names the culprit, and nothing is lost.

Law, of every row: the command ends within 30 s (60 s in a new interpreter) with exit code 2, or with another code that
the row names; standard error has at most three lines, besides those of a run without a mistake, and no traceback, and
contains the texts that the row names (flag, file or value); every file that stood there before is unchanged; new files
appear only in the output folder. The rows of the group `control` use the same inputs unbroken and must end with 0, so
that no row is refused for another reason than its own.

    python -m campaigns.bad_inputs [GROUP[/CASE] ...]
"""

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from campaigns.inputs import (
    checkpoint,
    commands,
    control,
    data,
    endpoint,
    environment,
    flags,
    output,
    recipe,
    resume,
    reward,
)
from campaigns.inputs.case import Case, Place
from campaigns.report import Report
from tests.e2e import command
from tests.e2e.command import UNEVALUATED
from tests.testing import save_tiny_checkpoint

DEADLINE_S = 30.0
START_S = 30.0  # more for a new interpreter, which imports torch first
MOST_LINES = 3
AT_ONCE = 2
SHOWN = 160


@dataclass(frozen=True)
class Outcome:
    code: int | None  # None: it did not end
    err: str
    seconds: float
    lost: tuple[str, ...]  # files that stood there before and have changed, and new ones outside of the output folder


def attempt(case: Case, folder: Path, shared: Path) -> Outcome:
    """Prepare one case in the new `folder`, run it and compare the files."""
    folder.mkdir()
    place = Place(folder, shared / "model", shared / "run")
    argv = case.prepare(place)
    variables = {name: value.replace(".", str(folder)) if name == "PYTHONPATH" and value == "." else value
                 for name, value in case.variables.items()}  # fmt: skip
    before = contents(folder) | contents(shared)
    start = time.monotonic()
    ended = run_fresh(argv, folder, variables) if case.is_fresh else run_forked(argv, folder, variables)
    seconds = time.monotonic() - start
    after = contents(folder) | contents(shared)
    err = (folder / "out" / "err").read_text(errors="replace")
    changed = [str(path) for path in before if after.get(path) != before[path]] if case.code else []
    written = (place.output, folder / "out", folder / "__pycache__")
    stray = [str(path) for path in after.keys() - before if not any(path.is_relative_to(one) for one in written)]
    return Outcome(ended, err, seconds, tuple(sorted(changed + stray)))


def run_forked(argv: list[str], folder: Path, variables: Mapping[str, str]) -> int | None:
    process = command.start(argv, folder / "out", variables)
    process.join(DEADLINE_S)
    code = process.exitcode
    process.kill()
    process.join()
    return code


def run_fresh(argv: list[str], folder: Path, variables: Mapping[str, str]) -> int | None:
    (folder / "out").mkdir()
    root = str(Path(__file__).parents[1])
    path = f"{root}:{variables['PYTHONPATH']}" if "PYTHONPATH" in variables else root
    with open(folder / "out" / "out", "w") as out, open(folder / "out" / "err", "w") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "fsdptrain", *argv],
            env={**os.environ, **variables, "PYTHONPATH": path},
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    try:
        return process.wait(START_S + DEADLINE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def contents(folder: Path) -> dict[Path, str]:
    """Return the digest of each file, or the target of each link."""
    found: dict[Path, str] = {}
    for path in folder.rglob("*"):
        if path.is_symlink():
            found[path] = os.readlink(path)
        elif path.is_file():
            found[path] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def broken_law(case: Case, outcome: Outcome, lines: list[str]) -> str | None:
    """Return what does not hold, in one line. lines: of standard error that a good run does not have."""
    missing = [text for text in case.texts if text not in outcome.err]
    if outcome.code is None:
        return f"still running after {outcome.seconds:.0f} s"
    if "Traceback" in outcome.err:
        return f"traceback: {lines[-1][:SHOWN]}"
    if outcome.code != case.code:
        return f"exit code {outcome.code}, not {case.code}"
    if len(lines) > MOST_LINES:
        return f"{len(lines)} lines on standard error"
    if missing:
        return f"does not name {missing[0]}"
    if outcome.lost:
        return f"changed {outcome.lost[0]}"
    return None


def _form(line: str) -> str:
    """Return a line without its numbers."""
    return re.sub(r"[0-9][0-9.e+-]*", "#", line)


def all_cases() -> list[Case]:
    groups = (control, recipe, flags, data, checkpoint, reward, output, environment, resume, endpoint, commands)
    return [case for group in groups for case in group.cases()]


def main(chosen: list[str]) -> int:
    cases = [case for case in all_cases() if not chosen or {case.group, f"{case.group}/{case.name}"} & {*chosen}]
    report = Report("bad_inputs" if not chosen else f"chosen_{os.getpid()}", (__doc__ or "").split("\n\n")[1])
    with tempfile.TemporaryDirectory(prefix="bad-inputs-") as name, ThreadPoolExecutor(AT_ONCE) as threads:
        root = Path(name)
        os.environ.update(HF_HOME=str(root / "hub"), HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", OMP_NUM_THREADS="1")
        os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # as the command line sets it before it imports transformers
        shared = root / "shared"
        save_tiny_checkpoint(shared / "model")
        argv = ["--hf-checkpoint", str(shared / "model"), "--output-dir", str(shared / "run"), *UNEVALUATED]
        good = command.run([*argv, "--save-interval", "1"], root / "out")
        assert good.code == 0, good.err
        usual = {_form(line) for line in good.err.splitlines()}
        work = [threads.submit(attempt, case, root / f"{i:03}", shared) for i, case in enumerate(cases)]
        for i, (case, future) in enumerate(zip(cases, work, strict=True)):
            outcome = future.result()
            shutil.rmtree(root / f"{i:03}", ignore_errors=True)
            lines = [line for line in outcome.err.splitlines() if _form(line) not in usual]
            shown = [line.replace(name, "<tmp>") for line in lines]
            report.add(
                case.group,
                (broken_law(case, outcome, lines) or "").replace(name, "<tmp>") or None,
                case=case.name.encode("unicode_escape").decode(),
                code=outcome.code,
                lines=len(shown),
                message=(shown or [""])[-1][:SHOWN],
                **({"accepted": f"{case.code}: {case.why}"} if case.why else {}),
            )
    return report.finish()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
