"""The cores and cgroup v2 limits (container, Slurm job) of this process."""

import math
import os
import sys
from pathlib import Path

_MEMBERSHIP, _ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def usable_cores(membership: Path = _MEMBERSHIP, root: Path = _ROOT) -> int:
    """Return the number of cores within the CPU affinity and the cgroup limits; at least 1."""
    affinity = os.sched_getaffinity(0) if sys.platform == "linux" else range(os.cpu_count() or 1)
    return max(1, min([len(affinity), *map(_cores_of, cgroup_files("cpu.max", membership, root))]))


def cgroup_files(name: str, membership: Path = _MEMBERSHIP, root: Path = _ROOT) -> list[Path]:
    """Return the files `name` of the cgroups that apply to this process, innermost first."""
    lines = membership.read_text().splitlines() if membership.is_file() else []
    paths = [root / line.removeprefix("0::").lstrip("/") for line in lines if line.startswith("0::")]
    groups = [folder for path in paths for folder in (path, *path.parents) if folder.is_relative_to(root)]
    return [group / name for group in groups if (group / name).is_file()]


def _cores_of(limit: Path) -> int:
    quota, period = limit.read_text().split()
    return 2**31 if quota == "max" else math.ceil(int(quota) / int(period))
