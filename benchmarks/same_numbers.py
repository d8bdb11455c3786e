"""Show that two checkouts compute the same numbers: record a table of tiny runs with each, then compare.

    git worktree add ../before main
    VLLM="--vllm-python .venv-vllm/bin/python"            # without it, runs with vLLM are skipped
    python benchmarks/same_numbers.py record --checkout ../before --output before.json $VLLM
    python benchmarks/same_numbers.py record --checkout . --output after.json $VLLM
    python benchmarks/same_numbers.py compare before.json after.json          # exit code 1: numbers differ

`record` runs `python -m fsdptrain` of the checkout on CPUs, with the interpreter of this script, and stores metrics
(without clocks and memory), digests of the exported tensors, and digests of the sampled texts. `--only NAME ...`
selects runs by name or shell pattern, `--work DIR` keeps their output, `--jobs N` runs N at one time.

`compare` prints a row per run: `bitwise`, or the largest relative difference and its name. Up to --tolerance (1e-6) is
equal. Runs and metrics that the new recording lacks count as differences, additional ones do not. `--rename OLD=NEW`
adds to RENAMED_METRICS (`old/=new/` renames a group), `--ignore PATTERN` accepts the loss of a metric.

same_numbers_runs.py has the table of runs. Two recordings of the same code on the same machine are bitwise equal.
"""

import argparse
import contextlib
import hashlib
import importlib.util
import json
import multiprocessing
import os
import platform
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors import safe_open
from same_numbers_compare import compare
from same_numbers_runs import Run, select_runs, write_inputs

COUNTED = ("perf/pack_fill", "perf/rank_imbalance", "perf/shared_tokens")  # the only perf/ metrics without a clock
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
PRELOADED = ["torch.distributed.fsdp", "torch._dynamo", "transformers.modeling_utils", "reasoning_gym", "peft"]
CONTEXT = multiprocessing.get_context("forkserver")  # ranks start in 1 s: they fork from a process with torch


class Settings(NamedTuple):
    """Settings shared by all runs of a recording."""

    checkout: Path
    folder: Path  # inputs of the runs
    vllm_python: str | None
    timeout: float  # per run [s]


def record(args: argparse.Namespace) -> int:
    """Run the table with the code of a checkout and write what it computed. Returns 1 if a run failed."""
    selected = select_runs(args.only)
    chosen = [run for run in selected if args.vllm_python or not run.needs_vllm]
    if len(chosen) < len(selected):
        print(f"{len(selected) - len(chosen)} runs with vLLM are left out: they need --vllm-python")
    with contextlib.ExitStack() as stack:
        folder = args.work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="same_numbers_")))
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "pictures.jsonl").exists():
            write_inputs(folder)
        checkout = args.checkout.resolve()
        settings = Settings(checkout, folder.resolve(), args.vllm_python, args.timeout)
        report = {"checkout": _describe(checkout), "models": _digests(folder / "models"), "runs": {}}
        begin = time.monotonic()
        with ThreadPoolExecutor(args.jobs) as pool:
            pending = [pool.submit(_record_run, run, settings) for run in chosen]
            for count, future in enumerate(as_completed(pending), 1):
                name, found = future.result()
                report["runs"][name] = found
                outcome = found.get("error") or f"{len(found['metrics'])} rows, {len(found['tensors'])} tensors"
                print(f"[{count:3}/{len(chosen)}] {name:26} {found['seconds']:6.1f} s  {outcome}", flush=True)
    report["seconds"] = round(time.monotonic() - begin, 1)
    report["runs"] = {run.name: report["runs"][run.name] for run in chosen}
    args.output.write_text(json.dumps(report, indent=1) + "\n")
    failed = [name for name, found in report["runs"].items() if "error" in found]
    print(f"{args.output}: {len(chosen)} runs in {report['seconds']} s, {len(failed)} failed {' '.join(failed)}")
    return int(bool(failed))


def _record_run(run: Run, settings: Settings) -> tuple[str, dict[str, Any]]:
    folder = settings.folder / "runs" / run.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    begin = time.monotonic()
    error = _execute(run, settings, folder)
    seconds = round(time.monotonic() - begin, 1)
    if error:
        return run.name, {"seconds": seconds, "error": error}
    found = {"metrics": _metrics(folder), "samples": _samples(folder), "tensors": _tensors(folder / "hf")}
    return run.name, {"flags": shlex.join(run.flags), "num_ranks": run.num_ranks, "seconds": seconds, **found}


def _execute(run: Run, settings: Settings, folder: Path) -> str | None:
    """Run all ranks to completion. Returns the last error line of a failed run, else None."""
    flags = [str(settings.vllm_python) if flag == "VLLM_PYTHON" else flag for flag in run.flags]
    argv = ["--hf-checkpoint", f"models/{run.model}", "--output-dir", str(folder), *flags]
    python = settings.vllm_python if "vllm" in run.marks else None
    ranks = [
        CONTEXT.Process(target=_run_rank, args=(argv, variables, folder / f"rank{rank}.log", settings, python))
        for rank, variables in enumerate(_variables(run.num_ranks))
    ]
    for rank in ranks:
        rank.start()
    _wait(ranks, settings.timeout)
    codes = [rank.exitcode for rank in ranks]
    if not any(codes):
        return None
    output = "\n".join(path.read_text() for path in sorted(folder.glob("rank*.log")))
    lines = [line for line in output.splitlines() if line.strip()] or ["no output"]
    told = [line for line in lines if line.startswith("fsdptrain: ")] or lines
    return f"failed with {codes}: {told[-1]}"


def _wait(ranks: list[ForkServerProcess], timeout: float) -> None:
    """Wait for all ranks. Kills ranks that exceed the timeout, and ranks that wait for a failed one."""
    deadline = time.monotonic() + timeout
    while any(rank.is_alive() for rank in ranks) and time.monotonic() < deadline:
        if any(rank.exitcode for rank in ranks):
            deadline = min(deadline, time.monotonic() + 20.0)
        time.sleep(0.05)
    for rank in [rank for rank in ranks if rank.is_alive()]:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.pid or 0, signal.SIGKILL)
    for rank in ranks:
        rank.join()


def _run_rank(argv: list[str], variables: dict[str, str], log: Path, settings: Settings, python: str | None) -> None:
    """Run `python -m fsdptrain *argv` with the code of the checkout. Call it in a new process."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(settings.folder)
    paths = [str(settings.checkout), str(settings.folder)]
    os.environ.update(variables, **ENVIRONMENT, PYTHONPATH=os.pathsep.join(paths))
    if python is not None:
        os.execv(python, [python, "-m", "fsdptrain", *argv])
    sys.path[:0] = paths
    sys.argv = ["fsdptrain", *argv]
    found = importlib.util.find_spec("fsdptrain")
    assert found is not None
    assert found.origin == str(settings.checkout / "fsdptrain" / "__init__.py"), found.origin
    runpy.run_module("fsdptrain", run_name="__main__", alter_sys=True)


def _variables(num_ranks: int) -> list[dict[str, str]]:
    """Return the variables that torchrun sets for each rank; none for a single rank."""
    if num_ranks == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    size = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), **size, **address} for rank in range(num_ranks)]


def _describe(checkout: Path) -> dict[str, str]:
    git = ["git", "-C", str(checkout), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, check=False, capture_output=True, text=True).stdout.strip()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"commit": commit, "python": platform.python_version(), **versions}


def _digests(models: Path) -> dict[str, str]:
    files = sorted(models.rglob("*.safetensors"))
    return {path.parent.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _metrics(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {n: v for n, v in row.items() if n != "time" and (n in COUNTED or not n.startswith("perf/"))} for row in rows
    ]


def _samples(folder: Path) -> dict[str, str]:
    """Digests of the sampled texts and their rewards, by step and set."""
    digests: dict[str, Any] = {}
    for line in (folder / "samples.jsonl").read_text().splitlines():
        row = json.loads(line)
        digest = digests.setdefault(f"{row['step']} {row['set']}", hashlib.sha256())
        digest.update(json.dumps([row["prompt"], row["response"], row["reward"]]).encode())
    return {key: digest.hexdigest() for key, digest in digests.items()}


def _tensors(folder: Path) -> dict[str, dict[str, Any]]:
    """Digest and sums of each exported tensor. `signs`: sums with random signs, from which distances are estimated."""
    found = {}
    for path in sorted(folder.rglob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                values = tensor.double().flatten()
                signs = torch.randint(2, (16, values.numel()), generator=torch.Generator().manual_seed(0)).double()
                found["/".join([*path.parent.relative_to(folder).parts, name])] = {
                    "sha256": hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest(),
                    "kind": f"{tensor.dtype} {list(tensor.shape)}",
                    "sum": values.sum().item(),
                    "abs_sum": values.abs().sum().item(),
                    "norm": values.norm().item(),
                    "signs": ((2 * signs - 1) @ values).tolist(),
                }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    recorder = commands.add_parser("record", help="run the table with the code of a checkout")
    recorder.set_defaults(function=record)
    recorder.add_argument("--checkout", type=Path, required=True)
    recorder.add_argument("--output", type=Path, required=True)
    recorder.add_argument("--only", nargs="+", default=[], metavar="NAME", help="runs, by name or shell pattern")
    recorder.add_argument("--vllm-python", type=os.path.abspath, help="interpreter with vLLM; without it, no vLLM runs")
    recorder.add_argument("--jobs", type=int, default=2, help="concurrent runs")
    recorder.add_argument("--timeout", type=float, default=300.0, help="time limit of a run [s]")
    recorder.add_argument("--work", type=Path, help="folder in which to keep inputs and outputs")
    comparer = commands.add_parser("compare", help="compare two recordings")
    comparer.set_defaults(function=compare)
    comparer.add_argument("old", type=Path)
    comparer.add_argument("new", type=Path)
    comparer.add_argument("--rename", nargs="+", default=[], metavar="OLD=NEW", help="renamed metrics")
    comparer.add_argument("--ignore", nargs="+", default=[], metavar="PATTERN", help="metrics that may be missing")
    comparer.add_argument("--only", nargs="+", default=[], metavar="NAME", help="runs, by name or shell pattern")
    comparer.add_argument("--tolerance", type=float, default=1e-6, help="largest relative difference")
    args = parser.parse_args()
    os.environ.update(ENVIRONMENT)  # before the server of CONTEXT starts
    CONTEXT.set_forkserver_preload(PRELOADED)
    return args.function(args)


if __name__ == "__main__":
    sys.exit(main())
