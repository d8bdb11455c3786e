"""Runs inside vLLM's workers: takes new weights from files, or from the trainer over a process group.

Servers load it with

    --worker-extension-cls fsdptrain.vllm.worker.extension.WorkerExtension
    --weight-transfer-config '{"backend": "fsdptrain"}'

vLLM's environment need not be the trainer's: beside vLLM this package needs only torch and safetensors.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from vllm.distributed.weight_transfer import WeightTransferEngineFactory  # pyright: ignore[reportMissingImports]
from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from fsdptrain.vllm.worker.readback import checksums
from fsdptrain.vllm.worker.reload import WeightReload
from fsdptrain.vllm.worker.weight_group import Plane, Spec, WeightGroup, bucket_size, local_address, unpack_bucket

BACKEND = "fsdptrain"


class WorkerExtension:
    """Methods that vLLM adds to its worker. vLLM imports this module before it loads the model."""

    get_model: Callable[[], nn.Module]  # attributes of vLLM's own worker
    weight_transfer_engine: "Transfer"
    _weight_update_active: bool

    def fsdptrain_checksums(self, names: list[str], kind: Any) -> dict[str, int]:
        """Checksums of the layers that vLLM computes with, by names of a checkpoint; unreadable ones are left out."""
        return checksums(self.get_model(), names, kind)

    def fsdptrain_abort_update(self) -> None:
        """End an update that an earlier trainer has started: vLLM would refuse each new one."""
        if self._weight_update_active:
            self.weight_transfer_engine.abort()
            self._weight_update_active = False


@dataclass
class Join(WeightTransferInitInfo):
    """Where the trainer waits for the workers of this engine."""

    plane: Plane
    host: str
    port: int
    world_size: int  # the trainer and all workers of this engine
    timeout_s: float


@dataclass
class Update(WeightTransferUpdateInfo):
    """A part of the weights: files that this machine can read, or one bucket that the trainer sends now."""

    paths: list[str] = field(default_factory=list)
    bucket: list[dict[str, Any]] = field(default_factory=list)


class Transfer(WeightTransferEngine[Join, Update]):
    """Passes weights on to `WeightReload`."""

    init_info_cls = Join
    update_info_cls = Update

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._group: WeightGroup | None = None
        self._reload: WeightReload | None = None

    def init_transfer_engine(self, init_info: Join) -> None:
        parallel = self.parallel_config
        rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
        timeout = timedelta(seconds=init_info.timeout_s)
        store = dist.TCPStore(init_info.host, init_info.port, init_info.world_size, is_master=False, timeout=timeout)
        self._group = WeightGroup(
            init_info.plane,
            store,
            rank=rank,
            world_size=init_info.world_size,
            timeout_s=init_info.timeout_s,
            address=local_address(init_info.host),
        )

    def start_weight_update(self) -> None:
        self.abort()
        self._reload = WeightReload(self.model, self.model_config)
        self._reload.start()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Replaces the method of the base class, which synchronizes a device that a CPU does not have."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Update) -> None:
        reload = self._reload
        assert reload is not None, "start_weight_update comes first"
        for path in update_info.paths:
            with safe_open(path, "pt", device=str(self.device)) as file:
                reload.load((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118 - not a dict
        if update_info.bucket:
            assert self._group is not None, "init_transfer_engine comes first"
            specs = [Spec(**spec) for spec in update_info.bucket]
            reload.load(unpack_bucket(self._group.receive(bucket_size(specs)), specs))

    def finish_weight_update(self) -> None:
        reload, self._reload = self._reload, None
        assert reload is not None, "start_weight_update comes first"
        reload.finish()

    def abort(self) -> None:
        """End an update that failed, or whose trainer is gone. The next one must load all weights."""
        reload, self._reload = self._reload, None
        if reload is not None:
            reload.abort()

    def shutdown(self) -> None:
        self._group = None


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, Transfer)
