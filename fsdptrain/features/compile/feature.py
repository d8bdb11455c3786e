"""The torch.compile feature."""

from transformers import PreTrainedModel

from fsdptrain import platform
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import ConfigError
from fsdptrain.feature import Feature
from fsdptrain.features.compile.layers import check_compiler, compile_layers
from fsdptrain.fsdp.mesh import Meshes


class CompileFeature(Feature):
    def transform_model(self, model: PreTrainedModel, meshes: Meshes) -> None:
        del meshes
        with raise_on_all_ranks(ConfigError, "--compile"):
            check_compiler(platform.device_type())
            compile_layers(model)
