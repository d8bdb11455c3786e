"""Runs inside vLLM's workers: takes new weights from files, or from the trainer over a process group.

Servers load it with `--worker-extension-cls fsdptrain.vllm.worker.extension.WorkerExtension`. vLLM's environment need
not be the trainer's: this package needs nothing that vLLM does not need.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any, ParamSpec

import torch
from safetensors import safe_open
from torch import Tensor, nn

from fsdptrain.vllm.worker.readback import checksums
from fsdptrain.vllm.worker.reload import reload_weights
from fsdptrain.vllm.worker.weight_group import WeightGroup, join_store, local_address, tensors_of

log = logging.getLogger(__name__)

_P = ParamSpec("_P")


def _returning_error(method: Callable[_P, None]) -> Callable[_P, str | None]:
    """`method` returns its error: after an exception, vLLM would take the other workers' answers for those to its next
    call."""

    @wraps(method)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> str | None:
        try:
            method(*args, **kwargs)
        except Exception as error:
            log.exception("new weights cannot be loaded")
            return f"{type(error).__name__}: {error}"
        return None

    return call


class WorkerExtension:
    """Methods that vLLM adds to its worker. The trainer calls each in all workers of an engine at the same time."""

    get_model: Callable[[], nn.Module]  # attributes of vLLM's own worker
    vllm_config: Any
    device: torch.device

    def fsdptrain_checksums(self, names: list[str], kind: Any) -> dict[str, int]:
        """Checksums of the layers that vLLM computes with, by names of a checkpoint; unreadable ones are left out."""
        return checksums(self.get_model(), names, kind)

    @_returning_error
    def fsdptrain_load_files(self, paths: list[str]) -> None:
        """Load all weights from files that this machine can read."""
        reload_weights(self.get_model(), self.vllm_config, _tensors_in(paths, self.device))

    @_returning_error
    def fsdptrain_receive_weights(
        self, host: str, port: int, world_size: int, timeout_s: float, sizes: list[int]
    ) -> None:
        """Load all weights from files that the trainer at `host` broadcasts.

        world_size: of the trainer and all workers of this engine
        sizes: of the files [bytes]
        """
        parallel = self.vllm_config.parallel_config
        group = WeightGroup(
            join_store(host, port, world_size, timeout_s),
            rank=1 + parallel.data_parallel_index * parallel.world_size + parallel.rank,
            world_size=world_size,
            timeout_s=timeout_s,
            address=local_address(host),
        )
        weights = (pair for size in sizes for pair in tensors_of(group.receive(size)))
        reload_weights(self.get_model(), self.vllm_config, weights)


def _tensors_in(paths: Sequence[str], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    for path in paths:
        with safe_open(path, "pt", device=str(device)) as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_tensor(name)
