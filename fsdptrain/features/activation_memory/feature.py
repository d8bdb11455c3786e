"""The feature that recomputes decoder layers in the backward pass."""

from pathlib import Path

from transformers import PreTrainedModel

from fsdptrain.config import Config
from fsdptrain.feature import Feature
from fsdptrain.features.activation_memory.checkpointing import enable_gradient_checkpointing
from fsdptrain.features.activation_memory.config import ActivationMemoryConfig
from fsdptrain.fsdp.mesh import Meshes


class CheckpointingFeature(Feature):
    def __init__(self, *, on_host: bool) -> None:
        self._on_host = on_host

    @classmethod
    def create(cls, config: Config, checkpoint: Path) -> "CheckpointingFeature":
        return cls(on_host=config.section(ActivationMemoryConfig).offload_activations)

    def transform_model(self, model: PreTrainedModel, meshes: Meshes) -> None:
        enable_gradient_checkpointing(model, on_host=self._on_host)
