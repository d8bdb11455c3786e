"""Number of cores available to this process."""

import math
import os
import sys
from pathlib import Path

_MEMBERSHIP, _ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def usable_cores(membership: Path = _MEMBERSHIP, root: Path = _ROOT) -> int:
    """Return the number of cores within the CPU affinity and the cgroup v2 limits; at least 1."""
    affinity = os.sched_getaffinity(0) if sys.platform == "linux" else range(os.cpu_count() or 1)
    lines = membership.read_text().splitlines() if membership.is_file() else []
    own = [root / line.removeprefix("0::").lstrip("/") for line in lines if line.startswith("0::")]
    limits = [path / "cpu.max" for group in own for path in (group, *group.parents) if path.is_relative_to(root)]
    return max(1, min([len(affinity), *(_cores_of(limit) for limit in limits if limit.is_file())]))


def _cores_of(limit: Path) -> int:
    quota, period = limit.read_text().split()
    return 2**31 if quota == "max" else math.ceil(int(quota) / int(period))
