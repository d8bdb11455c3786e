"""Run everything that needs a GPU, without network, in the order of its use: tests, kernels, speed, a run that learns.

    make gpu-wheels                            # on a machine with network: wheels for the GPU machine, to wheels/
    make gpu                                   # on the GPU machine: python3 benchmarks/gpu.py; again: goes on
    python3 benchmarks/gpu.py --steps tests    # these steps, even if they are done

The GPU machine needs Python 3.12 with torch and transformers. Other missing packages are installed from --wheels;
existing ones are not changed. Until then, only the standard library is used. Creates an environment in --venv that sees
the packages of the current Python, even if that is itself a virtual environment.

Each call takes at most --minutes. It runs the steps that are not done, first those that no call has begun, then those
that failed or were stopped; benchmarks go on where they were stopped. --output gets the log and the report of each
step, gpu.json, and table.md, all written as soon as a step ends. Exit code 1: something failed, or is not done.

--rehearse runs the same steps with tiny sizes, with or without a GPU. Without one, the tests skip themselves.
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
NEEDED = ["pydantic>=2.11", "pyyaml", "rich>=14", "psutil", "accelerate"]
NEEDED += ["pytest", "hypothesis", "numpy"]
OPTIONAL = {"trl>=1.16": "train_step.py has no other side", "peft>=0.21": "no LoRA", "liger-kernel": "no liger rows"}
MARK = re.compile(r"pytest\.mark\.gpu\b")
OUTCOME = re.compile(r"^(tests/\S+::.+?) (PASSED|FAILED|SKIPPED|ERROR)\b", re.MULTILINE)  # a line of pytest -v
REASON = re.compile(r"^(?:FAILED|ERROR) (tests/\S+::.+?) - (.*)", re.MULTILINE)  # a line of its summary
COUNTS = ("passed", "failed", "errors", "skipped")
_PEER = ["--bf16", "--lengths", "ragged", "--vocab", "151936"]
_PEER += ["--hidden", "1024", "--layers", "8", "--groups", "8", "--completion", "600", "--longest", "4096"]
_PEER += ["--micro", "8", "--max-tokens", "16384", "--rounds", "3"]
_FULL = ["--adapters", "full"]
_16K = ["--tokens", "16384"]
_OTHERS = ["E", "F", "I", "liger", "sdpa by segment", "flash-attn 2", "optimizer on host"]


def steps(memory_gib: float) -> dict[str, list[str]]:
    """Return the steps in order: name, script and its flags. `tests` has none.

    The variants that keep activations need 110 to 130 GiB for Qwen3-4B with 16k tokens, by the memory plan.
    """
    large = "Qwen3-4B" if memory_gib > 130 else "Qwen3-1.7B"
    one = ["benchmarks/mfu.py", "--warm-up", "2", "--steps", "3", "--case-minutes", "3", "--shapes"]
    grpo, sft = ["--kinds", "grpo"], ["--kinds", "sft"]
    return {
        "tests": [],
        "mfu_grpo": [*one, large, *_16K, *grpo, *_FULL, "--variants", "A", "C", "G", "H", "--profile"],
        "mfu_sft": [*one, large, *_16K, *sft, *_FULL, "--variants", "A", "G", "H"],
        "learns": ["benchmarks/learns.py"],
        "mfu_128k": [*one, "Qwen3-4B", "--tokens", "131072", *sft, *_FULL, "--variants", "activations on host"],
        "mfu_lora": [*one, "Qwen3-4B", *_16K, "65536", *grpo, "--adapters", "lora", "--variants", "A", "G"],
        "train_step": ["benchmarks/train_step.py", *_PEER],
        "mfu_sizes": [*one, "Qwen3-0.6B", "Qwen3-4B", "Qwen3-8B", *_16K, *_FULL, "--variants", "A", "G"],
        "mfu_variants": [*one, large, *_16K, *grpo, *_FULL, "--variants", *_OTHERS],
    }


def quick(name: str, command: list[str]) -> list[str]:
    """Return the command of a step with tiny sizes."""
    if name.startswith("mfu"):
        return [command[0], "--quick", "--kinds", "grpo", "--adapters", "full", "--variants", "A"]
    return [command[0], "--quick"] if command else []


def main() -> int:
    args = arguments()
    deadline = time.monotonic() + 60 * args.minutes
    args.output.mkdir(parents=True, exist_ok=True)
    python = make_environment(args.venv)
    left_out = install(python, args.wheels)
    machine = describe(python)
    found = earlier(args.output, machine) | {"left_out": left_out, "machine": machine}
    if not machine["gpu"] and not args.rehearse:
        print("torch sees no GPU here; --rehearse tries the steps without one")
        return 1
    every = steps(machine.get("gpu_memory_gib", 0))
    chosen = args.steps or sorted((name for name in every if not is_done(found, name)), key=lambda name: name in found)
    run = Run(python, args.output, deadline)
    for name in chosen:
        if deadline - time.monotonic() < 30:  # no time to begin anything
            break
        command = quick(name, every[name]) if args.rehearse else every[name]
        if name == "train_step":
            command += ["--sides", "ours", "packed", *([] if "trl>=1.16" in left_out else ["compact", "async"])]
        found[name] = (
            run.tests(none_is_fine=args.rehearse and not machine["gpu"])
            if name == "tests"
            else run.script(name, command, fresh=bool(args.steps))
        )
        write(args.output, found, list(every))
    undone = [name for name in every if not is_done(found, name)]
    print((args.output / "table.md").read_text() if found.keys() & every.keys() else "", end="")
    print(f"not done: {', '.join(undone) or 'nothing'}")
    return 1 if undone else 0


def is_done(found: Mapping[str, Any], name: str) -> bool:
    return name in found and found[name]["exit"] == 0


def earlier(output: Path, machine: Mapping[str, Any]) -> dict[str, Any]:
    """Return the steps of earlier calls on the same machine with the same versions."""
    path = output / "gpu.json"
    found = json.loads(path.read_text()) if path.is_file() else {}
    same = ("gpu", "torch", "transformers")
    return found if all(found.get("machine", {}).get(key) == machine.get(key) for key in same) else {}


def make_environment(folder: Path) -> Path:
    """Create a new environment on top of the packages of this Python. Returns its interpreter."""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    [own] = (folder / "lib").glob("python*/site-packages")
    below = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    lines = [f"import site; site.addsitedir({path!r})\n" for path in below if Path(path).is_dir()]
    (own / "packages_below.pth").write_text("".join(lines))
    return folder / "bin" / "python"


def install(python: Path, wheels: Path) -> dict[str, str]:
    """Install missing packages from `wheels` only: required packages together, optional ones one by one.

    Returns what a missing optional package leaves out.
    """
    left_out = {}
    where = ["--no-index", "--find-links", str(wheels), "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", *where]
    done = subprocess.run([*pip, *NEEDED], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{wheels} does not hold what is missing here (make gpu-wheels fills it):\n{done.stderr[-2000:]}")
    for name, loss in OPTIONAL.items():
        done = subprocess.run([*pip, name], capture_output=True, text=True, check=False)
        if done.returncode:
            left_out[name] = f"{loss}: {done.stderr.strip().splitlines()[-1][:200]}"
    return left_out


def describe(python: Path) -> dict[str, Any]:
    """Return the torch and transformers versions and the GPU, from record.py."""
    code = "import json, record; print(json.dumps(record.machine() | record.versions()))"
    variables = {**os.environ, "PYTHONPATH": f"{ROOT / 'benchmarks'}:{ROOT}"}
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, env=variables, check=False)
    if done.returncode:
        sys.exit(f"the environment does not work:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


class Run:
    """Runs steps, each with the remaining time."""

    def __init__(self, python: Path, output: Path, deadline: float) -> None:
        self.python, self.output, self.deadline = python, output, deadline

    def tests(self, *, none_is_fine: bool) -> dict[str, Any]:
        """Run the tests marked gpu, from the files that contain any. Warnings are not turned into errors.

        none_is_fine: without a GPU, all are skipped.
        """
        files = [
            str(f.relative_to(ROOT)) for f in sorted((ROOT / "tests").rglob("test_*.py")) if MARK.search(f.read_text())
        ]
        options = ["-m", "gpu", "-v", "--color=no", "-p", "no:cacheprovider", "-o", "filterwarnings=default"]
        found = self._command("tests", ["-m", "pytest", *files, *options])
        found |= outcomes((self.output / "tests.log").read_text())
        if found["exit"] == 0 and not found["passed"] and not none_is_fine:
            found["exit"] = "no test passed"
        return found | ({"exit": 0} if none_is_fine and found["exit"] == 5 else {})

    def script(self, name: str, command: Sequence[str], *, fresh: bool) -> dict[str, Any]:
        """Run a script with its report in `name`.json. Returns its result and the printed table."""
        flags = ["--json", str((self.output / f"{name}.json").resolve())]
        if name.startswith("mfu"):  # it stops a case 30 s after its time
            minutes = (self.deadline - time.monotonic() - 60) / 60
            flags += ["--minutes", f"{minutes:.2f}", "--folder", str(ROOT / "runs" / "gpu-weights")]
            flags += ["--fresh"] if fresh else []
        found = self._command(name, [*command, *flags])
        lines = (self.output / f"{name}.log").read_text().splitlines()
        return {**found, "table": [line for line in lines if line.startswith("| ")], "last": lines[-1:]}

    def _command(self, name: str, argv: Sequence[str]) -> dict[str, Any]:
        """Run a command in a new session, so that all its processes can be stopped."""
        limit = max(1.0, self.deadline - time.monotonic() - 10)
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


def write(output: Path, found: Mapping[str, Any], every: Sequence[str]) -> None:
    """Write gpu.json and table.md."""
    (output / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")
    machine = found["machine"]
    lines = [f"# {machine['gpu'] or 'No GPU'}, torch {machine['torch']}, transformers {machine['transformers']}", ""]
    lines += [f"{name}: {loss}" for name, loss in found["left_out"].items()]
    for name in every:
        part = found.get(name, {})
        counts = [f"{part[key]} {key}" for key in COUNTS if key in part]
        lines += ["", f"## {name}: exit {part.get('exit', 'not run')}, {part.get('s', 0)} s; {', '.join(counts)}", ""]
        lines += [f"- {test}" for test in part.get("failed tests", [])] + (part.get("table") or part.get("last") or [])
    (output / "table.md").write_text("\n".join(lines) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--wheels", type=Path, default=ROOT / "wheels", help="folder with wheels of missing packages")
    add("--venv", type=Path, default=ROOT / ".venv-gpu", help="environment, created again each time")
    add("--output", type=Path, default=ROOT / "benchmarks" / "results" / "gpu")
    add("--minutes", type=float, default=8.5)
    add("--steps", nargs="+", choices=list(steps(0)), help="run these, in this order; default: what is not done")
    add("--rehearse", action="store_true", help="run the same steps with tiny sizes, with or without a GPU")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
