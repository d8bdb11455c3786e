"""Common parts of the benchmarks: the header of every file in benchmarks/results, timing, and comparisons."""

import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # for `tests.testing`
TOLERANCES = {False: 1e-4, True: 5e-2}  # relative, for loss and gradient norm: float32 in another summation order; bf16
_PACKAGES = ("torch", "transformers", "numpy", "trl", "liger-kernel")


def header() -> dict[str, Any]:
    """Return the command, commit, machine with its load, and versions, for the start of a report."""
    module = sys.modules["__main__"].__spec__  # of `python -m`
    program = ["-m", module.name] if module else [os.path.relpath(sys.argv[0], ROOT)]
    return {
        "command": shlex.join(["python", *program, *sys.argv[1:]]),
        "commit": _commit(),
        "machine": machine(),
        "versions": {"python": platform.python_version(), **versions()},
    }


def machine() -> dict[str, Any]:
    """Describe the machine. `load`: load averages over 1, 5 and 15 minutes, this benchmark included."""
    found: dict[str, Any] = {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "load": [round(load, 1) for load in os.getloadavg()],
        "gpu": None,
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["gpu_memory_gib"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30)
        found["cuda"] = torch.version.cuda
    return found


def _cpu() -> str:
    """Return the CPU name on Linux, else the architecture."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def write(path: Path | None, report: Mapping[str, Any]) -> None:
    """Write `report` to `path` atomically. None: do nothing."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(report, indent=1) + "\n")
        partial.replace(path)


def kept_rows(path: Path, begin: Mapping[str, Any], *, name: str = "runs") -> list[dict[str, Any]]:
    """Return the rows of an existing results file, so that they are not measured again.

    Exits if another commit or other versions produced them, because a file has one header, `begin`.
    """
    if not path.exists():
        return []
    found = json.loads(path.read_text())
    if any(found.get(key) != begin[key] for key in ("commit", "versions")):
        sys.exit(f"{path.name} was made by commit {found['commit']}: --fresh measures all of it again")
    return found[name]


def spread(values: Iterable[float]) -> dict[str, float]:
    """Return the median, minimum and maximum."""
    found = list(values)
    named = {"median": statistics.median(found), "least": min(found), "most": max(found)}
    return {name: rounded(value) for name, value in named.items()}


def rounded(value: float) -> float:
    """Round to four significant digits."""
    return float(f"{value:.4g}")


def require_agreement(found: Mapping[str, Mapping[str, float]], tolerance: float, *, case: str) -> None:
    """Exit if the loss or gradient norm of the sides differs by more than `tolerance`, or is not finite."""
    for name in ("loss", "grad_norm"):
        values = {side: run[name] for side, run in found.items()}
        low, high = min(values.values()), max(values.values())
        if not all(map(math.isfinite, values.values())) or not high - low <= tolerance * max(abs(low), abs(high), 1e-2):
            sys.exit(f"{case}: the sides do not agree: {name} is {values}")


def measured(step: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Run `step` and add its wall time (waiting for the device), CPU time and peak memory."""
    start_peak()
    wall, cpu = time.perf_counter(), time.process_time()
    found = step()
    wait_for_device()
    seconds = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
    return {**found, **seconds, "peak_mib": peak_mib()}


def wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def table(rows: list[dict[str, Any]]) -> str:
    """Format rows with the same keys as a Markdown table."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(["" if x is None else str(x) for x in r.values()] for r in rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def status(name: str) -> int:
    """Read an entry of /proc/self/status. [bytes]"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def start_peak() -> None:
    """Reset the peak memory: of the device, or of this process without one."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    elif sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")  # resets the kernel's peak resident size


def peak_mib() -> float:
    """Return the peak since `start_peak`. [MiB]"""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return status("VmHWM") / 2**20


def versions() -> dict[str, str]:
    """Return the versions of the installed packages that affect the numbers."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    """Return the commit of this repository, or "" without git.

    A plus is appended if files other than results have changed.
    """
    git = ["git", "-C", str(ROOT)]
    look = [*git, "status", "-s", "-uno", "--", ".", ":!benchmarks/results"]
    try:
        found = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run(look, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found.stdout.strip() + ("+" if changed.strip() else "")
