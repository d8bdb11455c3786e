"""Free memory of the device and of the host."""

from pathlib import Path

import psutil
import torch

from fsdptrain import platform

_CGROUP = Path("/sys/fs/cgroup")  # that of this container


def device_memory() -> tuple[int, int]:
    """Return free and total memory of this process's device, or of the host on a CPU. [bytes]"""
    if not platform.has_accelerator():
        return host_memory()
    return torch.accelerator.get_memory_info(platform.local_device())


def host_memory() -> tuple[int, int]:
    """Return available and total memory of the host, or of the container if it has a limit. [bytes]"""
    memory = psutil.virtual_memory()
    used, limit = (_number(_CGROUP / name) for name in ("memory.current", "memory.max"))
    if used is None or limit is None or limit > memory.total:
        return memory.available, memory.total
    return min(memory.available, max(0, limit - used)), limit


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no cgroup of version 2, or no limit: `max`
        return None
