"""Count lines of the package, the tests, the spine, the benchmarks and what a plain run imports; options. `make size`

The spine is the list of files in docs/architecture.md, "A tour in reading order". A plain run is dense GRPO in one
process with the embedded engine, on a tiny random model. `python -m tests.null_gpu benchmarks/size.py` counts what it
imports with an accelerator, emulated.
"""

import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from fsdptrain.config.keys import all_keys

ROOT = Path(__file__).parents[1]
TARGETS = {
    "package": 34_000,
    "tests": 27_000,
    "spine": 3_600,
    "imported by a plain run": 12_500,
    "benchmarks and campaigns": 4_000,
    "options": 175,
}
RUN = """
import os, runpy, sys
if "null_gpu" in os.environ.get("LD_PRELOAD", ""):
    from tests.null_gpu.emulate import start
    start()
sys.argv = ["fsdptrain", *sys.argv[1:]]
try:
    runpy.run_module("fsdptrain", run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
for name, module in sorted(sys.modules.items()):
    if name.split(".")[0] == "fsdptrain" and getattr(module, "__file__", None):
        print("imported", module.__file__)
"""


def main() -> None:
    imported = imported_files()
    counts = {
        "package": total(ROOT.glob("fsdptrain/**/*.py")),
        "tests": total(ROOT.glob("tests/**/*.py")),
        "spine": total(spine_files()),
        "imported by a plain run": total(imported),
        "benchmarks and campaigns": total([*ROOT.glob("benchmarks/*.py"), *ROOT.glob("campaigns/*.py")]),
        "options": len(all_keys()),
    }
    for name, count in counts.items():
        print(f"{name:26} {count:7,}  (target {TARGETS[name]:,})")
    folders = Counter[str]()
    for path in imported:
        parts = path.relative_to(ROOT / "fsdptrain").parts
        folders["/".join(parts[:-1][:2]) or "top level"] += num_lines(path)
    for folder, count in folders.most_common():
        print(f"    {folder:22} {count:7,}")


def spine_files() -> list[Path]:
    page = (ROOT / "docs" / "architecture.md").read_text()
    tour = page[page.index("## A tour in reading order") :]
    return [ROOT / "fsdptrain" / name for name in re.findall(r"^\d+\. `([\w/]+\.py)`", tour, flags=re.MULTILINE)]


def imported_files() -> list[Path]:
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        program = "import sys, pathlib, tests.testing as t; t.save_tiny_checkpoint(pathlib.Path(sys.argv[1]))"
        subprocess.run([sys.executable, "-c", program, model], check=True, cwd=ROOT, capture_output=True)
        flags = f"--hf-checkpoint {model} --output-dir {folder}/run --no-bf16 --num-rollout 1 --rollout-batch-size 2"
        flags += " --n-samples-per-prompt 2 --rollout-max-response-len 8 --eval-interval 0 --keep-last 0 --no-export"
        command = [sys.executable, "-c", RUN, *flags.split()]
        result = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)
    rows = [line.removeprefix("imported ") for line in result.stdout.splitlines() if line.startswith("imported ")]
    return [Path(row) for row in rows]


def total(files) -> int:
    return sum(map(num_lines, files))


def num_lines(path: Path) -> int:
    return path.read_text().count("\n")


if __name__ == "__main__":
    main()
