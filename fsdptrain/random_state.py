"""Keep the random generators of this process while a library seeds or draws."""

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
    of_torch, of_device = torch.get_rng_state(), platform.device_rng_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
        if of_device is not None:
            platform.set_device_rng_state(of_device)
