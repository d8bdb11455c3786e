"""Runs inside vLLM's workers: fsdptrain's part of vLLM's own protocol of weight updates, and the proof after an update.

Servers load it with `--worker-extension-cls fsdptrain.vllm.worker.extension.WorkerExtension`. vLLM's environment need
not be the trainer's: this package needs nothing that vLLM does not need.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm.config.weight_transfer import WeightTransferConfig  # pyright: ignore[reportMissingImports] - an extra
from vllm.distributed.weight_transfer import WeightTransferEngine  # pyright: ignore[reportMissingImports]
from vllm.distributed.weight_transfer.nccl_engine import (  # pyright: ignore[reportMissingImports]
    NCCLWeightTransferEngine,
)

from fsdptrain.vllm.weight_file import read
from fsdptrain.vllm.worker.reload import Reload

log = logging.getLogger(__name__)


class _Reloads:
    """Loads with `Reload`. Keeps the error of an update: after an exception, vLLM would take the other workers' answers
    for those to its next call."""

    model: Any  # vLLM resets it after the update
    vllm_config: Any
    is_checked = False  # the next update
    outcome: tuple[str | None, dict[str, int]]  # of the last update: its error, and checksums if it was verified

    def start_weight_update(self) -> None:
        self.model = Reload(self.model, self.vllm_config, checked=self.is_checked)

    def finish_weight_update(self) -> None:
        self.is_checked = False
        try:
            self.model.finish()
            self.outcome = None, self.model.checksums()
        except Exception as error:
            log.exception("new weights cannot be loaded")
            self.outcome = f"{type(error).__name__}: {error}", {}


class FileEngine(_Reloads, WeightTransferEngine):
    """Loads the file that the trainer wrote."""

    def init_transfer_engine(self, init_info: Any) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(update_info)  # without the wait for an accelerator, which vLLM's own has

    def receive_weights(self, update_info: dict[str, Any]) -> None:
        self.model.load_weights(read(**update_info))

    def shutdown(self) -> None: ...


class NcclEngine(_Reloads, NCCLWeightTransferEngine):
    """Receives the weights over vLLM's NCCL group."""


ENGINES = {"file": FileEngine, "nccl": NcclEngine}


class WorkerExtension:
    """Methods that vLLM adds to its worker. The trainer calls each in all workers of an engine at the same time."""

    get_model: Callable[[], nn.Module]  # attributes of vLLM's own worker
    vllm_config: Any
    device: torch.device
    weight_transfer_engine: Any

    def fsdptrain_begin(self, transfer: str) -> None:
        """A run begins, whose updates use this transfer. The previous run may have been killed within an update."""
        config = WeightTransferConfig(backend=transfer)
        self.weight_transfer_engine = ENGINES[transfer](config, self.vllm_config, self.device, self.get_model())
        self._weight_update_active = False

    def fsdptrain_expect_checksums(self) -> None:
        """The next update is verified."""
        self.weight_transfer_engine.is_checked = True

    def fsdptrain_outcome(self) -> list[Any]:
        """Of the last update: its error, and the checksums of the tensors that vLLM loaded if it was verified."""
        return [*self.weight_transfer_engine.outcome]
