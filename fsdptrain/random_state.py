"""The random generators of this process: kept while a library seeds or draws, and the state of the device's."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from fsdptrain import platform


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restore the states of Python, NumPy and torch on exit, regardless of draws and seeding inside."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    of_torch, of_device = torch.get_rng_state(), device_rng_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
        if of_device is not None:
            set_device_rng_state(of_device)


def device_rng_state() -> torch.Tensor | None:
    """Return the RNG state of this process's device, as bytes on the host. None on a CPU: use torch.get_rng_state()."""
    return torch.get_device_module(platform.device_type()).get_rng_state() if platform.has_accelerator() else None


def set_device_rng_state(state: torch.Tensor) -> None:
    """Restore the state returned by `device_rng_state`. No-op on a CPU."""
    if platform.has_accelerator():
        torch.get_device_module(platform.device_type()).set_rng_state(state)
