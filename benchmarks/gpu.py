"""Run everything that needs a GPU, without network: the tests marked gpu, then train_step.py and mfu.py.

    make gpu-wheels                         # on a machine with network: download wheels for the GPU machine to wheels/
    make gpu                                # on the GPU machine: python3 benchmarks/gpu.py
    python3 benchmarks/gpu.py --parts mfu   # one part per call: each gets all of --minutes, the results are merged

The GPU machine needs Python 3.12 with torch and transformers. Other missing packages are installed from --wheels;
existing ones are not changed. Until then, only the standard library is used. Creates an environment in --venv that sees
the packages of the current Python, even if that is itself a virtual environment. Everything ends within --minutes:
later parts are stopped and reported. Writes train_step.json, mfu.json, a log of each part, gpu.json with the results,
and table.md to --output. Exit code 1: a test failed, no test passed, or a benchmark did not finish.

Without a GPU, --cpu runs the same steps with tiny sizes; the tests skip themselves.
"""

import argparse
import json
import os
import re
import shutil
import signal
import site
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ["pydantic>=2.11", "tyro>=1.0", "pyyaml", "rich>=14", "psutil", "accelerate", "xxhash"]
NEEDED += ["pytest", "hypothesis", "numpy"]
OPTIONAL = {"trl>=1.16": "train_step.py has no other side", "peft>=0.21": "no LoRA", "liger-kernel": "no liger rows"}
MARK = re.compile(r"pytest\.mark\.gpu\b")
OUTCOME = re.compile(r"^(tests/\S+::.+?) (PASSED|FAILED|SKIPPED|ERROR)\b", re.MULTILINE)  # a line of pytest -v
REASON = re.compile(r"^(?:FAILED|ERROR) (tests/\S+::.+?) - (.*)", re.MULTILINE)  # a line of its summary
COUNTS = ("passed", "failed", "errors", "skipped")
TRAIN_STEP = [
    *("--bf16", "--sides", "ours", "packed", "compact", "--lengths", "ragged", "--vocab", "151936", "--hidden", "1024"),
    *("--layers", "8", "--groups", "8", "--completion", "600", "--longest", "4096", "--micro", "8"),
    *("--max-tokens", "16384", "--rounds", "3"),
]
MFU = [
    *("--shapes", "Qwen3-4B", "--tokens", "16384", "--kinds", "grpo", "sft", "--adapters", "full", "--warm-up", "2"),
    *("--steps", "3", "--case-minutes", "3", "--profile", "--variants", "base", "compile", "compile and liger"),
    "sdpa by segment",
]
# Memory that torch's allocator reserves for a step of Qwen3-4B, by tokens of the pack [GiB]: its own code ran without a
# GPU for 64.1, 90.6 and 98.8 GiB of tensors (16k, selective 16k, nothing recomputed 8k), plus up to 19 % fragmentation.
RESERVED_GIB = {
    "selective": {16_384: 108, 8192: 80, 4096: 74},
    "nothing recomputed": {16_384: 160, 8192: 116, 4096: 94},
}
PARTS = ("tests", "train_step", "mfu")


def main() -> int:
    args = arguments()
    deadline = time.monotonic() + 60 * args.minutes
    args.output.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"minutes": args.minutes}
    python = make_environment(args.venv)
    found["install"] = install(python, args.wheels)
    found["machine"] = describe(python)
    if not found["machine"]["gpu"] and not args.cpu:
        return finish(
            args.output, found | {"failed": "torch sees no GPU here; --cpu tries the way without one"}, cpu=False
        )
    run = Run(python, args.output, deadline)
    shares = dict.fromkeys(args.parts, 0.35) | {args.parts[-1]: 1.0}
    quick = ["--quick"] if args.cpu else []
    if "tests" in shares:
        found["tests"] = run.tests(share=shares["tests"])
    if "train_step" in shares:
        rest = ["--sides", "ours", "packed"] if "trl>=1.16" in found["install"]["left out"] else []
        found["train_step"] = run.benchmark("train_step", [*(quick or TRAIN_STEP), *rest], share=shares["train_step"])
    if "mfu" in shares:
        left = (deadline - time.monotonic() - 45) / 60
        large = that_fit(found["machine"].get("gpu_memory_gib", 0))
        mfu = [*quick, "--variants", "base"] if args.cpu else [*MFU, *large, "--minutes", f"{left:.2f}"]
        found["mfu"] = run.benchmark("mfu", mfu, share=1.0)
    return finish(args.output, found, cpu=args.cpu)


def that_fit(memory_gib: float) -> list[str]:
    """Return the variants of mfu.py that need much memory, each with the largest pack that fits, as NAME@TOKENS."""
    found = []
    for name, reserved in RESERVED_GIB.items():
        fitting = [tokens for tokens, need in reserved.items() if need < 0.97 * memory_gib]
        found += [f"{name}@{max(fitting)}"] if fitting else []
    return found


def make_environment(folder: Path) -> Path:
    """Create a new environment on top of the packages of this Python. Returns its interpreter."""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    [own] = (folder / "lib").glob("python*/site-packages")
    below = [path for path in (*site.getsitepackages(), site.getusersitepackages()) if Path(path).is_dir()]
    (own / "packages_below.pth").write_text("".join(f"{path}\n" for path in below))  # if this is a virtual environment
    return python


def install(python: Path, wheels: Path) -> dict[str, Any]:
    """Install missing packages from `wheels` only: required packages together, optional ones one by one."""
    begin, left_out = time.monotonic(), {}
    where = ["--no-index", "--find-links", str(wheels), "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", *where]
    done = subprocess.run([*pip, *NEEDED], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{wheels} does not hold what is missing here (make gpu-wheels fills it):\n{done.stderr[-2000:]}")
    for name, loss in OPTIONAL.items():
        done = subprocess.run([*pip, name], capture_output=True, text=True, check=False)
        if done.returncode:
            left_out[name] = f"{loss}: {done.stderr.strip().splitlines()[-1][:200]}"
    return {"s": round(time.monotonic() - begin, 1), "left out": left_out}


def describe(python: Path) -> dict[str, Any]:
    """Return the torch and transformers versions and the GPU, from record.py."""
    code = "import json, record; print(json.dumps(record.machine() | record.versions()))"
    variables = {**os.environ, "PYTHONPATH": f"{ROOT / 'benchmarks'}:{ROOT}"}
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, env=variables, check=False)
    if done.returncode:
        sys.exit(f"the environment does not work:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


class Run:
    """Runs commands in sequence, each with a share of the remaining time."""

    def __init__(self, python: Path, output: Path, deadline: float) -> None:
        self.python, self.output, self.deadline = python, output, deadline

    def tests(self, share: float) -> dict[str, Any]:
        """Run the tests marked gpu, from the files that contain any. Warnings are not turned into errors."""
        files = [
            str(f.relative_to(ROOT)) for f in sorted((ROOT / "tests").rglob("test_*.py")) if MARK.search(f.read_text())
        ]
        options = ["-m", "gpu", "-v", "--color=no", "-p", "no:cacheprovider", "-o", "filterwarnings=default"]
        found = self._command("tests", ["-m", "pytest", *files, *options], share)
        return {**found, **outcomes((self.output / "tests.log").read_text())}

    def benchmark(self, name: str, flags: Sequence[str], share: float) -> dict[str, Any]:
        """Run a benchmark with its report in `name`.json. Returns its result and the printed table."""
        report = self.output / f"{name}.json"
        report.unlink(missing_ok=True)
        found = self._command(name, [f"benchmarks/{name}.py", "--json", str(report.resolve()), *flags], share)
        lines = (self.output / f"{name}.log").read_text().splitlines()
        return {**found, "report": report.is_file(), "table": [line for line in lines if line.startswith("| ")]}

    def _command(self, name: str, argv: Sequence[str], share: float) -> dict[str, Any]:
        """Run a command in a new session, so that all its processes can be stopped."""
        limit = max(1.0, share * (self.deadline - time.monotonic() - 10))
        variables: Mapping[str, str] = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        begin = time.monotonic()
        print(f"{name}: at most {limit:.0f} s", flush=True)
        with (self.output / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                [self.python, *argv],
                cwd=ROOT,
                env=variables,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | str = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = f"stopped after {limit:.0f} s"
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        print(f"{name}: {code}, {time.monotonic() - begin:.0f} s", flush=True)
        return {"exit": code, "s": round(time.monotonic() - begin, 1)}


def outcomes(log: str) -> dict[str, Any]:
    """Count test outcomes from the output of pytest -v, even if it was stopped."""
    ended = OUTCOME.findall(log)
    counts = {name: sum(outcome == name.upper() for _, outcome in ended) for name in ("passed", "failed", "skipped")}
    reasons = dict(REASON.findall(log))  # only if pytest finished
    failed = [f"{test}: {reasons.get(test, 'see tests.log')[:200]}" for test, outcome in ended if outcome == "FAILED"]
    errors = [f"{test}: {reasons.get(test, 'see tests.log')[:200]}" for test, outcome in ended if outcome == "ERROR"]
    return {**counts, "errors": len(errors), "failed tests": failed + errors}


def is_sound(found: Mapping[str, Any], *, cpu: bool) -> bool:
    """Return whether all parts succeeded. On a GPU at least one test must have passed."""
    if "failed" in found or any(found[name]["exit"] != 0 for name in ("train_step", "mfu") if name in found):
        return False
    tests = found.get("tests")
    if tests is None:
        return True
    return tests["exit"] in (0, 5) if cpu else tests["exit"] == 0 and tests["passed"] > 0


def finish(output: Path, found: dict[str, Any], *, cpu: bool) -> int:
    """Write gpu.json and table.md, with parts of earlier calls. Returns the exit code of this call."""
    code = 0 if is_sound(found, cpu=cpu) else 1
    report = output / "gpu.json"
    earlier = json.loads(report.read_text()) if report.is_file() else {}
    if earlier.get("machine") == found["machine"]:
        found = {name: part for name, part in earlier.items() if name in PARTS} | found
    report.write_text(json.dumps(found, indent=1) + "\n")
    lines = [f"# {found['machine']['gpu'] or 'No GPU'}, torch {found['machine']['torch']}, "
             f"transformers {found['machine']['transformers']}", ""]  # fmt: skip
    lines += [f"{name}: {loss}" for name, loss in found["install"]["left out"].items()]
    if "failed" in found:
        lines.append(found["failed"])
    for name in PARTS:
        part = found.get(name, {})
        counts = [f"{part[key]} {key}" for key in COUNTS if key in part]
        lines += ["", f"## {name}: exit {part.get('exit', 'not run')}, {part.get('s', 0)} s; {', '.join(counts)}", ""]
        lines += [f"- {test}" for test in part.get("failed tests", [])] + part.get("table", [])
    (output / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return code


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--wheels", type=Path, default=ROOT / "wheels", help="folder with wheels of missing packages")
    add("--venv", type=Path, default=ROOT / ".venv-gpu", help="environment, created again each time")
    add("--output", type=Path, default=ROOT / "benchmarks" / "results" / "gpu")
    add("--minutes", type=float, default=8.5)
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to run in this call, in this order")
    add("--cpu", action="store_true", help="run the same steps without a GPU, with tiny sizes")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
