"""Number of cores available to this process."""

import math
import os
import sys
from pathlib import Path

from fsdptrain.cgroup import MEMBERSHIP, ROOT, cgroup_files


def usable_cores(membership: Path = MEMBERSHIP, root: Path = ROOT) -> int:
    """Return the number of cores within the CPU affinity and the cgroup v2 limits; at least 1."""
    affinity = os.sched_getaffinity(0) if sys.platform == "linux" else range(os.cpu_count() or 1)
    return max(1, min([len(affinity), *map(_cores_of, cgroup_files("cpu.max", membership, root))]))


def _cores_of(limit: Path) -> int:
    quota, period = limit.read_text().split()
    return 2**31 if quota == "max" else math.ceil(int(quota) / int(period))
