"""Frozen weights of linear layers in 4 bits under a LoRA adapter (QLoRA)."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fsdptrain.config import Config
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import ConfigError
from fsdptrain.feature import ChangeWeight, Feature
from fsdptrain.features.quantized_base.linear import BLOCK, QuantizedLinear
from fsdptrain.fsdp.mesh import Meshes
from fsdptrain.model.structure import decoder_layers

log = logging.getLogger(__name__)

_NO_THREADS = "HF_DEACTIVATE_ASYNC_LOAD"  # an environment variable of transformers


class QuantizedBaseFeature(Feature):
    """Stores the weights of linear layers as codes. Comes before the adapter, which wraps the layers."""

    def __init__(self) -> None:
        self._stock: dict[str, nn.Linear] = {}  # stock weight name -> layer
        self._layers: dict[str, QuantizedLinear] = {}
        self._is_loaded = False

    @classmethod
    def create(cls, config: Config, checkpoint: Path) -> "QuantizedBaseFeature":
        with raise_on_all_ranks(ConfigError, "--load-in-4bit"):
            if torch.__version__ < "2.13":  # FSDP2 of torch 2.11 rejects parameters of whole numbers
                raise ConfigError(f"--load-in-4bit needs torch 2.13, and this is {torch.__version__}: update it")
        return cls()

    def add_parameters(self, model: PreTrainedModel) -> None:
        """Find the layers by their stock names, before an adapter wraps them."""
        self._stock = quantizable_layers(model)

    def transform_model(self, model: PreTrainedModel, meshes: Meshes) -> None:
        from peft.tuners.lora.layer import ParamWrapper

        wrapped = {base for module in model.modules() if isinstance(module, ParamWrapper) for base in module.modules()}
        for name, linear in self._stock.items():
            if linear not in wrapped and not linear.weight.requires_grad:  # adapted or trained itself
                self._layers[name] = QuantizedLinear.convert(linear)

    @contextmanager
    def without(self) -> Iterator[None]:
        before = os.environ.get(_NO_THREADS)
        if not self._is_loaded:  # threads of transformers would read weights faster than they are quantized
            os.environ[_NO_THREADS] = "1"
        for layer in self._layers.values():
            layer.swap()
        try:
            yield
        finally:
            if before is None:
                os.environ.pop(_NO_THREADS, None)
            else:
                os.environ[_NO_THREADS] = before
            for layer in self._layers.values():
                layer.swap()

    def after_load(self, model: PreTrainedModel) -> None:
        self._is_loaded = True
        weights = sum(layer.in_features * layer.out_features for layer in self._layers.values())
        log.info("frozen weights of %d linear layers in 4 bits: %s weights", len(self._layers), f"{weights:,}")

    def export_weight(self, name: str) -> ChangeWeight | None:
        layer = self._layers.get(name)
        return None if layer is None else lambda _: cast(Tensor, layer.full_precision())


def quantizable_layers(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return the layers by the names of their weights. Raises ConfigError if the model has none, or stacked experts."""
    inside = {module for layer in decoder_layers(model) for module in layer.modules()}
    if any(p.dim() == 3 and min(p.shape[1:]) > 1 for module in inside for p in module.parameters(recurse=False)):
        raise ConfigError(
            f"--load-in-4bit: the stacked experts of {type(model).__name__}, most of its "
            "weights, cannot be quantized: leave it out"
        )
    found = {
        f"{name}.weight": module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module in inside and module.in_features % BLOCK == 0
    }
    if not found:
        raise ConfigError(
            f"--load-in-4bit: {type(model).__name__} has no linear layer whose inputs are a "
            f"multiple of {BLOCK}: leave it out"
        )
    return found
