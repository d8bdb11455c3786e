"""The cores of this process, within the limits of cgroup v2 (container, Slurm job)."""

import math
import os
import sys
from pathlib import Path

_MEMBERSHIP, _ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def usable_cores(membership: Path = _MEMBERSHIP, root: Path = _ROOT) -> int:
    """Return the number of cores within the CPU affinity and the cgroup limits; at least 1."""
    cores = [len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1]
    for line in membership.read_text().splitlines() if membership.is_file() else ():
        group = root / line.removeprefix("0::").lstrip("/")
        for folder in (group, *group.parents) if line.startswith("0::") else ():
            limit = folder / "cpu.max"
            if folder.is_relative_to(root) and limit.is_file():
                quota, period = limit.read_text().split()
                cores += [] if quota == "max" else [math.ceil(int(quota) / int(period))]
    return max(1, min(cores))
