"""The LoRA feature: train an adapter instead of the weights. The model without it is the reference."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import ConfigError
from fsdptrain.feature import Adapter, ChangeWeight, Feature, Rows
from fsdptrain.features.lora.adapters import Adapters, add_adapters
from fsdptrain.features.lora.config import LoraConfig
from fsdptrain.features.lora.export import export_adapter
from fsdptrain.features.lora.weights import merged
from fsdptrain.protocols import ForwardRole
from fsdptrain.types import PackedBatch

log = logging.getLogger(__name__)


class LoraFeature(Feature):
    def __init__(self, config: Config, checkpoint: Path) -> None:
        self._config = config
        self._options = config.section(LoraConfig)
        self._checkpoint = checkpoint
        self._model: PreTrainedModel | None = None
        self._adapters: Adapters | None = None

    @classmethod
    def create(cls, config: Config, checkpoint: Path) -> "LoraFeature":
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
        return self.adapters.kind

    def export(self, target: Path, write_model: Callable[[Path], None]) -> None:
        """Write the adapter as a peft folder, the merged model, or both (--lora-export)."""
        form = self._options.export
        if form != "adapter":
            write_model(target)
        if form != "merged":
            assert self._model is not None
            folder = target if form == "adapter" else target / "adapter"
            export_adapter(self._model, self.adapters, folder, source=self._checkpoint, base=self._base_name)
        if form == "adapter":
            log.info("the adapter alone is exported; for merged weights: fsdptrain export RUN --lora-export merged")

    @property
    def _base_name(self) -> str:
        """Name of the base model in adapter_config.json: a Hub name, or that of a local folder without its path."""
        name = self._config.model.hf_checkpoint
        return Path(name).resolve().name if Path(name).is_dir() else name
