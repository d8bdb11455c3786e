"""The LoRA feature: train an adapter instead of the weights. The model without it is the reference."""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import ConfigError
from fsdptrain.feature import Adapter, ChangeWeight, Feature
from fsdptrain.features.lora.adapters import Adapters, add_adapters, require_peft
from fsdptrain.features.lora.config import LoraConfig
from fsdptrain.features.lora.digest import content_digest
from fsdptrain.features.lora.export import export_adapter, stream_adapter
from fsdptrain.features.lora.weights import merged
from fsdptrain.model.rows import Rows
from fsdptrain.protocols import AdapterEngine, ForwardRole, RolloutEngine
from fsdptrain.types import PackedBatch

log = logging.getLogger(__name__)


class LoraFeature(Feature):
    def __init__(self, config: Config, checkpoint: Path) -> None:
        self._config = config
        self._options = config.section(LoraConfig)
        self._checkpoint = checkpoint
        self._model: PreTrainedModel | None = None
        self._adapters: Adapters | None = None
        self._base_digest = ""  # digest of the frozen weights

    @classmethod
    def create(cls, config: Config, checkpoint: Path) -> "LoraFeature":
        with raise_on_all_ranks(ConfigError, "--lora-rank"):
            require_peft()
        return cls(config, checkpoint)

    @property
    def adapters(self) -> Adapters:
        assert self._adapters is not None, "add_parameters comes first"
        return self._adapters

    def add_parameters(self, model: PreTrainedModel) -> None:
        self._model = model
        with raise_on_all_ranks(ConfigError, "--lora-targets"):
            self._adapters = add_adapters(model, self._options)

    def without(self) -> AbstractContextManager[None]:
        return nullcontext() if self._adapters is None else self._adapters.detached()

    def after_load(self, model: PreTrainedModel) -> None:
        self.adapters.finish(seed=self._config.run.seed, cpu_offload=self._config.fsdp.cpu_offload)
        with self.adapters.detached():
            self._base_digest = content_digest(model)
        log.info("%s", self.adapters.line)

    def forward(
        self, batch: PackedBatch, rows: Rows, role: ForwardRole, inputs: dict[str, Any]
    ) -> AbstractContextManager[None]:
        return self.adapters.detached() if role == "reference" else nullcontext()

    def export_weight(self, name: str) -> ChangeWeight | None:
        layer = self.adapters.layers.get(name)
        return None if layer is None else partial(merged, layer=layer, device=platform.local_device())

    @property
    def adapter(self) -> Adapter:
        return self

    def identity(self) -> str:
        """Identify the adapter and its base weights, since a checkpoint does not contain the frozen weights."""
        return f"{self.adapters.kind} on weights {self._base_digest}"

    def push(self, engine: RolloutEngine, policy_version: int) -> bool:
        if self._options.sync != "adapter":
            return False
        assert isinstance(engine, AdapterEngine), "the configuration refuses other engines"
        engine.update_adapter(self.weights(), self.write_config, policy_version)
        return True

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full float32 adapter tensors by peft name, on the device. Collective; iterate to the end."""
        assert self._model is not None
        return stream_adapter(self._model, self.adapters)

    def export(self, target: Path, write_model: Callable[[Path], None]) -> None:
        """Write the adapter as a peft folder, the merged model, or both (--lora-export)."""
        form = self._options.export
        if form != "adapter":
            write_model(target)
        if form != "merged":
            assert self._model is not None
            folder = target if form == "adapter" else target / "adapter"
            export_adapter(self._model, self.adapters, folder, source=self._checkpoint, base=self._base_name)

    def write_config(self, folder: Path) -> None:
        """Write peft's adapter_config.json. Not collective."""
        self.adapters.write_config(folder, base=self._base_name)

    @property
    def _base_name(self) -> str:
        """Name of the base model in adapter_config.json: a Hub name or an absolute path."""
        name = self._config.model.hf_checkpoint
        return str(Path(name).resolve()) if Path(name).is_dir() else name
