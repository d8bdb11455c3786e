"""Say before and during a run whether it fits into memory. Nothing here changes an option."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import MemoryPlanError
from fsdptrain.memory.estimate import Machine, count, estimate

log = logging.getLogger(__name__)

_CGROUP = Path("/sys/fs/cgroup")  # that of this container


class MemoryReport:
    """The planned memory of a run. `planned`: bytes on the device of a rank; None without a device, or for Megatron."""

    def __init__(self, config: Config, *, num_ranks: int | None = None, local_ranks: int | None = None) -> None:
        """num_ranks, local_ranks: in all and on this node, by default those that were started."""
        self.planned: int | None = None
        self._config = config
        self._machine = Machine(
            num_ranks=num_ranks or dist.get_world_size(),
            device=device_memory()[0] if platform.has_accelerator() else None,
            host=host_memory()[0],
            has_accelerator=platform.has_accelerator(),
            local_ranks=local_ranks or int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        )
        self._model: PreTrainedModel | None = None

    def before_load(self, model: PreTrainedModel) -> None:
        """Log the planned memory, and a warning with flags if it is not free. Collective.

        Raises MemoryPlanError on all ranks instead of the warning with --strict.
        """
        self._model = model
        found = estimate(model, self._config, self._machine)
        self.planned = found.device or None
        log.info("planned memory of %s parameters: %s", count(sum(p.numel() for p in model.parameters())), found.line)
        with raise_on_all_ranks(MemoryPlanError, "--strict"):
            if not found.lacks:
                return
            parts = found.on_host if found.lacks == "host" and found.on_host else found.training
            largest = max(parts, key=lambda name: parts[name])
            line = f"this run may not fit ({largest} most of all): {found.line}; {self._advice()}"
            if self._config.model.strict:
                raise MemoryPlanError(f"--strict: {line}")
            log.warning("%s", line)

    def _advice(self) -> str:
        from fsdptrain.memory.advice import flags_that_help

        flags = flags_that_help(self._model, self._config, self._machine) if self._model is not None else []
        return f"flags that help, each alone: {', '.join(flags)}" if flags else "use more GPUs or a smaller model"

    @contextmanager
    def naming_flags(self) -> Iterator[None]:
        """Raise MemoryPlanError, with the flags that help, in place of an out-of-memory error of torch."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise MemoryPlanError(f"out of memory: {str(error).strip().splitlines()[0]} {self._advice()}") from error


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
