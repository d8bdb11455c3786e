"""Runs inside vLLM's workers: takes new weights from files, or from the trainer over a group. Start servers with

    --worker-extension-cls fsdptrain.rollout.vllm_worker.WorkerExtension
    --weight-transfer-config '{"backend": "fsdptrain"}'

The environment of vLLM need not be that of the trainer: beside vLLM this needs torch and safetensors only.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from vllm.distributed.weight_transfer import WeightTransferEngineFactory  # pyright: ignore[reportMissingImports]
from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from fsdptrain.rollout.delta import block_of
from fsdptrain.rollout.tied_head import repack_tied_head
from fsdptrain.rollout.vllm_readback import checksums
from fsdptrain.rollout.weight_group import Plane, Spec, WeightGroup, bucket_size, unpack_bucket

BACKEND = "fsdptrain"
_SHOWN = 5  # names that an error lists
_LAYERS_LOG = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")


class WorkerExtension:
    """vLLM imports this module for it, before the model is loaded, and so learns of the engine below."""

    get_model: Callable[[], nn.Module]  # vLLM's own worker has it

    def fsdptrain_checksums(self, names: list[str]) -> dict[str, int]:
        """Of the layers that answer, by the names of a checkpoint: of those of `names` that can be read."""
        return checksums(self.get_model(), names)


@dataclass
class Join(WeightTransferInitInfo):
    """Where the trainer waits for the workers of this engine."""

    plane: Plane
    host: str
    port: int
    world_size: int  # the trainer, and all workers of this engine
    timeout_s: float


@dataclass
class Update(WeightTransferUpdateInfo):
    """A part of the weights: files that this machine can read, or one bucket that the trainer sends now.

    partial: what does not come stays as it is. Said once in an update, before it ends.
    """

    paths: list[str] = field(default_factory=list)
    bucket: list[dict[str, Any]] = field(default_factory=list)
    partial: bool = False


class Transfer(WeightTransferEngine[Join, Update]):
    """One update: start, any number of parts, finish. It fails where a parameter of the model got no weights; of a
    partial update, where one got none and others of its block did."""

    init_info_cls = Join
    update_info_cls = Update

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._group: WeightGroup | None = None
        self._loaded: set[str] | None = set()
        self._is_partial = False

    def init_transfer_engine(self, init_info: Join) -> None:
        parallel = self.parallel_config
        rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
        timeout = timedelta(seconds=init_info.timeout_s)
        store = dist.TCPStore(init_info.host, init_info.port, init_info.world_size, is_master=False, timeout=timeout)
        self._group = WeightGroup(
            init_info.plane, store, rank=rank, world_size=init_info.world_size, timeout_s=init_info.timeout_s
        )

    def start_weight_update(self) -> None:
        self._loaded, self._is_partial = set(), False
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As in the base class, which would wait for a device that a CPU does not have."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Update) -> None:
        self._is_partial |= update_info.partial
        for path in update_info.paths:
            with safe_open(path, "pt", device=str(self.device)) as file:
                self._load((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118 - not a dict
        if update_info.bucket:
            assert self._group is not None, "the trainer makes the group first"
            specs = [Spec(**spec) for spec in update_info.bucket]
            self._load(unpack_bucket(self._group.receive(bucket_size(specs)), specs))

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        loaded = self.model.load_weights(weights)
        if loaded is None or self._loaded is None:  # a model that does not tell
            self._loaded = None
        else:
            self._loaded |= loaded

    def finish_weight_update(self) -> None:
        self._require_all()
        level = _LAYERS_LOG.level
        if self._is_partial:
            _LAYERS_LOG.setLevel(logging.ERROR)  # it warns of each layer that keeps what it has
        finalize_layerwise_reload(self.model, self.model_config)
        _LAYERS_LOG.setLevel(level)
        repack_tied_head(self.model)

    def _require_all(self) -> None:
        """vLLM only warns of layers that got no weights, and answers with their old ones."""
        if self._loaded is None or self.model_config.quantization is not None:
            return
        tied = self.model_config.hf_config.get_text_config().tie_word_embeddings
        names = {name for name, _ in self.model.named_parameters() if not (tied and name.endswith("lm_head.weight"))}
        if self._is_partial:
            touched = {block_of(name) for name in self._loaded}
            names = {name for name in names if block_of(name) in touched}
        missing = sorted(names - self._loaded)
        if missing:
            raise RuntimeError(f"{len(missing)} parameters got no weights, e.g. {', '.join(missing[:_SHOWN])}")

    def shutdown(self) -> None:
        self._group = None


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, Transfer)
