"""Device selection, communication backend, random state and memory, through torch.accelerator.

Set the environment variable FSDPTRAIN_PLATFORM to `cpu` to ignore an available accelerator.
"""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from fsdptrain.errors import ConfigError
from fsdptrain.rank_variables import read_rank_variables

GIB = 1024**3
PLATFORM = "FSDPTRAIN_PLATFORM"


def has_accelerator() -> bool:
    """Return whether this process computes on an accelerator."""
    return device_type() != "cpu"


def device_type() -> str:
    """Return FSDPTRAIN_PLATFORM if set, else the accelerator type (e.g. `cuda`) if available, else `cpu`.

    Raises ConfigError if FSDPTRAIN_PLATFORM names an unavailable device.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    available = accelerator.type if accelerator is not None else "cpu"
    requested = os.environ.get(PLATFORM, available)
    if requested not in ("cpu", available):
        options = "cpu" if available == "cpu" else f"{available} or cpu"
        raise ConfigError(
            f"{PLATFORM}={requested}: torch finds no such device on this machine; use {options}, or unset it"
        )
    return requested


def device_count() -> int:
    """Return the number of devices of this machine, which limits its number of processes; 1 on a CPU."""
    return torch.accelerator.device_count() if has_accelerator() else 1


def local_device() -> torch.device:
    """Return the device of this process, selected by LOCAL_RANK."""
    kind = device_type()
    return torch.device(kind) if kind == "cpu" else torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))


def use_local_device() -> None:
    """Make the device of this process the current one of this thread. A new thread has device 0."""
    if has_accelerator():
        torch.accelerator.set_device_index(local_device().index)


def distributed_backend() -> str:
    """Return the backend: the device's default for device tensors, gloo for host tensors. gloo is always available."""
    kind = device_type()
    return "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"


def bfloat16_reason() -> tuple[bool, str]:
    """Return whether this process's device multiplies in bfloat16 as fast as in float32, and why or why not."""
    if has_accelerator():
        return True, "this is an accelerator"
    names = {"avx512_bf16": "AVX512-BF16", "amx_bf16": "AMX", "bf16": "BF16 of ARM"}
    has = [name for key, name in names.items() if torch.cpu.get_capabilities().get(key)]
    return bool(has), f"this CPU has {' and '.join(has) or 'none of ' + ', '.join(names.values())}"


@contextmanager
def process_group(timeout_s: float) -> Iterator[None]:
    """Open the process group of torchrun's ranks, or of this process alone, and close it on exit.

    An existing group is reused and left open. `timeout_s` [s] applies to every wait between ranks. Raises ConfigError,
    or RankError if the ranks cannot connect.
    """
    if dist.is_initialized():
        yield
        return
    ranks = read_rank_variables()
    if has_accelerator():
        _check_device(local_device().index, torch.accelerator.device_count())
        use_local_device()
    store, rank, world_size = dist.HashStore(), 0, 1
    if ranks:
        from fsdptrain.rendezvous import open_store

        store, rank, world_size = open_store(ranks, timeout_s), ranks.rank, ranks.world_size
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(distributed_backend(), store=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _check_device(index: int, count: int) -> None:
    if index >= count:
        raise ConfigError(
            f"--nproc-per-node exceeds the number of devices of this machine: process {index + 1} finds "
            f"{count}; each process needs its own"
        )


def seed_everything(seed: int) -> None:
    """Seed the random generators of Python, NumPy and PyTorch in this process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def set_deterministic(enabled: bool) -> None:
    """Select deterministic kernels. Operations without one raise an error."""
    if enabled:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by cuBLAS
    torch.use_deterministic_algorithms(enabled)
