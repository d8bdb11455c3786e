"""Free memory of the device and of the host."""

import psutil
import torch

from fsdptrain import platform


def device_memory() -> tuple[int, int]:
    """Return free and total memory of this process's device, or of the host on a CPU. [bytes]"""
    if not platform.has_accelerator():
        return host_memory()
    return torch.accelerator.get_memory_info(platform.local_device())


def host_memory() -> tuple[int, int]:
    """Return available and total memory of the host. [bytes]"""
    memory = psutil.virtual_memory()
    return memory.available, memory.total
