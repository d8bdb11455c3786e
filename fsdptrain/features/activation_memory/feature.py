"""Features that reduce the activation memory of decoder layers: recomputation and offload to the host."""

from pathlib import Path

from transformers import PreTrainedModel

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import ConfigError
from fsdptrain.feature import Feature
from fsdptrain.features.activation_memory.checkpointing import check_selective, enable_gradient_checkpointing
from fsdptrain.features.activation_memory.config import ActivationMemoryConfig
from fsdptrain.features.activation_memory.offload import enable_activation_offload
from fsdptrain.fsdp.mesh import Meshes
from fsdptrain.fsdp.transfers import Transfers


class CheckpointingFeature(Feature):
    def __init__(self, options: ActivationMemoryConfig, *, trust_remote_code: bool) -> None:
        self._options = options
        self._trust_remote_code = trust_remote_code

    @classmethod
    def create(cls, config: Config, checkpoint: Path) -> "CheckpointingFeature":
        del checkpoint
        return cls(config.section(ActivationMemoryConfig), trust_remote_code=config.model.trust_remote_code)

    def transform_model(self, model: PreTrainedModel, meshes: Meshes) -> None:
        del meshes
        kind = self._options.gradient_checkpointing_kind
        with raise_on_all_ranks(ConfigError, "--gradient-checkpointing-kind"):
            if kind == "selective":
                check_selective(model.config, trust_remote_code=self._trust_remote_code)
            enable_gradient_checkpointing(model, kind=kind)


class OffloadFeature(Feature):
    def transform_model(self, model: PreTrainedModel, meshes: Meshes) -> None:
        del meshes
        enable_activation_offload(model, Transfers(platform.local_device()))
