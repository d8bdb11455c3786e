"""Activation checkpointing: save the input of a decoder layer and recompute the rest in the backward pass.

It comes before `shard_model`: FSDP hooks wrap the layer's forward, so the layer is gathered during recomputation. The
forward of a layer is replaced, not the layer, so parameter names stay those of the checkpoint.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch.autograd.graph import save_on_cpu
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.feature import Feature
from fsdptrain.features.sections import ActivationMemoryConfig
from fsdptrain.fsdp.mesh import Meshes
from fsdptrain.model.structure import decoder_layers, tower_layers, vision_parameters


class CheckpointingFeature(Feature):
    def __init__(self, *, on_host: bool) -> None:
        self._on_host = on_host

    @classmethod
    def create(cls, config: Config, checkpoint: Path) -> "CheckpointingFeature":
        return cls(on_host=config.section(ActivationMemoryConfig).offload_activations)

    def transform_model(self, model: PreTrainedModel, meshes: Meshes) -> None:
        enable_gradient_checkpointing(model, on_host=self._on_host)


class Recomputed:
    """A layer forward with activation checkpointing.

    Each forward pass calls `again` for a context, and the recomputation runs inside that context.
    """

    def __init__(self, stock: Callable[..., Any], *, on_host: bool) -> None:
        self.again: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._stock = stock
        self._on_host = on_host

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        saving: AbstractContextManager[Any] = nullcontext()
        if self._on_host:
            saving = save_on_cpu(pin_memory=platform.has_accelerator(), device_type=platform.device_type())
        with saving:
            return checkpoint(
                self._stock, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), self.again()), **kwargs
            )


def enable_gradient_checkpointing(model: PreTrainedModel, *, on_host: bool = False) -> None:
    """Recompute all decoder layers, also those of a trained vision tower.

    Gradients are bitwise equal to those without recomputation. on_host: keep the inputs of layers in host memory.
    """
    tower = tower_layers(model) if any(p.requires_grad for p in vision_parameters(model).values()) else []
    for layer in [*decoder_layers(model), *tower]:
        assert not isinstance(layer, FSDPModule), "enable_gradient_checkpointing comes before shard_model"
        layer.forward = Recomputed(layer.forward, on_host=on_host)
