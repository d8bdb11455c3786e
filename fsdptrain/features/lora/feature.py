"""The LoRA feature: train an adapter instead of the weights. The policy at the start is the reference."""

import logging
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import PreTrainedModel

from fsdptrain.config import Config
from fsdptrain.config.rules import Fact
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import CheckpointError, ConfigError
from fsdptrain.feature import Adapter, ChangeWeight, Feature, Rows
from fsdptrain.features.lora.adapters import Adapters, add_adapters, merged
from fsdptrain.features.lora.folder import WEIGHTS_FILE
from fsdptrain.features.sections import LoraConfig
from fsdptrain.fsdp.export import copy_rest
from fsdptrain.fsdp.export_folder import publish_folder, temporary_of
from fsdptrain.fsdp.mesh import Meshes
from fsdptrain.fsdp.stream import full_tensor
from fsdptrain.model.structure import reshard
from fsdptrain.protocols import ForwardRole
from fsdptrain.types import PackedBatch

_OF_THE_WHOLE = frozenset({"generation_config.json"})
log = logging.getLogger(__name__)


class LoraFeature(Feature):
    def __init__(self, config: Config, checkpoint: Path) -> None:
        self._config = config
        self._options = config.section(LoraConfig)
        self._start = None if self._options.init is None else Path(self._options.init)
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
        with raise_on_all_ranks(ConfigError, "--lora-targets, --lora-init"):
            self._adapters = add_adapters(model, self._options)
            if self._start is not None:
                self._adapters.check_start(self._start)

    def transform_model(self, model: PreTrainedModel, meshes: Meshes) -> None:
        """Store what is trained whole in float32 at least."""
        for name, p in model.named_parameters(remove_duplicate=False):
            if name in self.adapters.whole:
                p.data = p.data.to(torch.promote_types(p.dtype, torch.float32))

    def without(self) -> AbstractContextManager[None]:
        return nullcontext() if self._adapters is None else self._adapters.detached()

    def after_load(self, model: PreTrainedModel) -> None:
        self.adapters.finish(seed=self._config.run.seed, cpu_offload=self._config.fsdp.cpu_offload)
        if self._start is not None:
            with raise_on_all_ranks(ConfigError, f"--lora-init {self._start}"):
                self.adapters.load_start(self._start)
        log.info("%s", self.adapters.line)

    def forward(
        self, batch: PackedBatch, rows: Rows, role: ForwardRole, inputs: dict[str, Any]
    ) -> AbstractContextManager[None]:
        is_base = role == "reference" and not self._config.has(Fact.START)
        return self.adapters.detached() if is_base else nullcontext()  # else what is trained has been swapped

    def export_weight(self, name: str) -> ChangeWeight | None:
        layer = self.adapters.layers.get(name)
        return None if layer is None else partial(merged, layer=layer)

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
            self._export_adapter(target if form == "adapter" else target / "adapter")
        if form == "adapter":
            log.info("the adapter alone is exported; for merged weights: fsdptrain export RUN --lora-export merged")

    @torch.no_grad()
    def _export_adapter(self, target: Path) -> None:
        """Write a folder for peft's `from_pretrained`, with the tokenizer of the checkpoint. Collective.

        The complete folder is renamed to `target`. Raises CheckpointError on every rank.
        """
        assert self._model is not None
        reshard(self._model)
        parameters = self.adapters.parameters().items()
        tensors = {name: full_tensor(p, torch.float32).to("cpu", copy=True).contiguous() for name, p in parameters}
        name = self._config.model.hf_checkpoint
        base = Path(name).resolve().name if Path(name).is_dir() else name  # not the path of a local folder
        with raise_on_all_ranks(CheckpointError, f"the adapter cannot be exported to {target}"):
            if dist.get_rank() == 0:
                temporary = temporary_of(target)
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
                save_file(tensors, temporary / WEIGHTS_FILE, metadata={"format": "pt"})
                self.adapters.write_config(temporary, base=base)
                copy_rest(self._checkpoint, temporary, but=_OF_THE_WHOLE)
                publish_folder(target)
