"""Say before and during a run whether it fits into memory. Nothing here changes an option."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import MemoryPlanError
from fsdptrain.memory.estimate import Machine, count, estimate, flags_that_help, size_of

log = logging.getLogger(__name__)


def report_memory(model: PreTrainedModel, config: Config) -> None:
    """Log the planned memory before weights are loaded, and a warning with flags if it is not free. Collective.

    Raises MemoryPlanError on all ranks instead of the warning with --strict.
    """
    machine = _machine()
    found = estimate(model, config, machine)
    size = count(sum(p.numel() for p in model.parameters()))
    log.info("planned memory of %s parameters: %s", size, found.line)
    with raise_on_all_ranks(MemoryPlanError, "--strict"):
        if not found.lacks:
            return
        parts = found.on_host if found.lacks == "host" else max(found.training, found.generation, key=size_of)
        largest = max(parts, key=lambda name: parts[name]) if parts else "weights"
        line = f"this run may not fit ({largest} most of all): {found.line}; {_advice(model, config, machine)}"
        if config.model.strict:
            raise MemoryPlanError(f"--strict: {line}")
        log.warning("%s", line)


def planned_memory(model: PreTrainedModel, config: Config) -> int | None:
    """Return the planned peak on the device of a rank. None without a device, or with --backend megatron. [bytes]"""
    if config.model.backend != "fsdp" or not platform.has_accelerator():
        return None
    return estimate(model, config, _machine()).device


@contextmanager
def naming_flags(model: PreTrainedModel, config: Config) -> Iterator[None]:
    """Raise MemoryPlanError, with the flags that help, in place of an out-of-memory error of torch."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if config.model.backend != "fsdp":
            raise
        first = str(error).strip().splitlines()[0]
        raise MemoryPlanError(f"out of memory: {first} {_advice(model, config, _machine())}") from error


def _machine() -> Machine:
    return Machine(
        num_ranks=dist.get_world_size(),
        device=platform.device_memory()[0] if platform.has_accelerator() else None,
        host=platform.host_memory()[0],
        has_accelerator=platform.has_accelerator(),
        local_ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    )


def _advice(model: PreTrainedModel, config: Config, machine: Machine) -> str:
    flags = ", ".join(flags_that_help(model, config, machine))
    return f"flags that help, each alone: {flags}, or more GPUs" if flags else "use more GPUs or a smaller model"
