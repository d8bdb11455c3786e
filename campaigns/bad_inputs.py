"""Bad inputs of every kind, one command each: each is refused in one line that names the culprit, and nothing is lost.

Law, of every case: the command ends within 30 s with exit code 2; standard error has at most three lines, besides those
of a run without a mistake, and no traceback, and contains the texts of the case (flag, file or value); every file that
stood there before is unchanged; new files appear only in the output folder. The same inputs unbroken end with 0.

    python -m campaigns.bad_inputs [GROUP ...] [--json PATH]
"""

import argparse
import hashlib
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from campaigns.cases import Case, Place, all_cases
from campaigns.report import Report
from tests.e2e import command
from tests.e2e.command import UNEVALUATED
from tests.testing import save_tiny_checkpoint

DEADLINE_S = 30.0
MOST_LINES = 3


def attempt(case: Case, place: Place, usual: set[str]) -> str | None:
    """Run one case in a new folder. Returns what does not hold, in one line."""
    place.folder.mkdir()
    argv = case.prepare(place)
    roots = (place.folder, place.checkpoint.parent)
    before = contents(*roots)
    process = command.start(argv, place.folder / "out", {"PYTHONPATH": str(place.folder)})
    process.join(DEADLINE_S)
    code = process.exitcode
    process.kill()
    process.join()
    after = contents(*roots)
    err = (place.folder / "out" / "err").read_text(errors="replace")
    lines = [line for line in err.splitlines() if _form(line) not in usual]
    ours = (place.output, place.folder / "out", place.folder / "__pycache__")
    changed = [path for path in before if after.get(path) != before[path]] if case.code else []
    stray = [path for path in after.keys() - before.keys() if not any(path.is_relative_to(one) for one in ours)]
    laws = {
        f"ends within {DEADLINE_S:.0f} s": code is not None,
        f"exit code {case.code}, not {code}: {lines[-1:]}": code == case.code,
        f"no traceback: {lines[-1:]}": "Traceback" not in err,
        f"at most {MOST_LINES} lines, not {len(lines)}": len(lines) <= MOST_LINES,
        f"names {case.texts}: {lines[-1:]}": all(text in err for text in case.texts),
        f"files are unchanged: {changed + stray}": not changed and not stray,
    }
    return next((law[:300] for law, holds in laws.items() if not holds), None)


def contents(*folders: Path) -> dict[Path, str]:
    """Return the digest of each file, or the target of each link."""
    paths = [path for folder in folders for path in folder.rglob("*") if path.is_symlink() or path.is_file()]
    return {p: os.readlink(p) if p.is_symlink() else hashlib.sha256(p.read_bytes()).hexdigest() for p in paths}


def _form(line: str) -> str:
    """Return a line without its numbers."""
    return re.sub(r"[0-9][0-9.e+-]*", "#", line)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("groups", nargs="*", help="groups of cases; default: all")
    parser.add_argument("--json", type=Path, help="path of the report")
    options = parser.parse_args()
    report = Report(" ".join((__doc__ or "").split("\n\n")[1].split()), options.json)
    with tempfile.TemporaryDirectory(prefix="bad-inputs-") as name:
        root, shared = Path(name), Path(name) / "shared"
        os.environ.update(HF_HOME=str(root / "hub"), HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", OMP_NUM_THREADS="1")
        os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # as the command line sets it before it imports transformers
        save_tiny_checkpoint(shared / "model")
        argv = ["--hf-checkpoint", str(shared / "model"), "--output-dir", str(shared / "run"), *UNEVALUATED]
        good = command.run([*argv, "--save-interval", "1"], root / "out")
        assert good.code == 0, good.err
        usual = {_form(line) for line in good.err.splitlines()}
        for i, case in enumerate(all_cases()):
            if not options.groups or case.group in options.groups:
                place = Place(root / f"{i:03}", shared / "model", shared / "run")
                failure = attempt(case, place, usual)
                report.add(case.group, failure and failure.replace(name, "<tmp>"), case=case.name)
                shutil.rmtree(place.folder)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
