"""The torch.compile feature: each decoder layer without its attention, one graph for packs of all shapes.

Attention over a pack loops over its segments on a CPU and reads their lengths from the host on a GPU, so a compiler
would create a graph per pack. The attention is therefore called from the graph instead of traced, and all sizes are
symbolic from the first pack on.
"""

import os
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import ConfigError
from fsdptrain.feature import Feature
from fsdptrain.fsdp.mesh import Meshes
from fsdptrain.model.structure import decoder_layers


class CompileFeature(Feature):
    @classmethod
    def create(cls, config: Config, checkpoint: Path) -> "CompileFeature":
        with raise_on_all_ranks(ConfigError, "--compile"):
            check_compiler(platform.device_type())
        return cls()

    def transform_model(self, model: PreTrainedModel, meshes: Meshes) -> None:
        with raise_on_all_ranks(ConfigError, "--compile"):
            compile_layers(model)


def check_compiler(device_type: str) -> None:
    """Raise ConfigError if inductor cannot find its compiler."""
    cpu = device_type == "cpu"
    variable, names = ("CXX", ("g++", "clang++")) if cpu else ("CC", ("gcc", "clang"))
    chosen = os.environ.get(variable)
    wanted = (chosen,) if chosen else names
    if not cpu and find_spec("triton") is None:
        raise ConfigError("--compile needs the package triton, not installed here: install it, or leave --compile out")
    if not any(shutil.which(name) for name in wanted):
        raise ConfigError(
            f"--compile needs a C++ compiler and none is available (looked for {', '.join(wanted)}): install g++, "
            f"set {variable}, or leave --compile out"
        )


def compile_layers(model: PreTrainedModel, *, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile the forward of every decoder layer on its first call. Parameter names do not change."""
    name = str(model.config._attn_implementation)
    attention = ALL_ATTENTION_FUNCTIONS.get(name)
    if attention is not None:
        AttentionInterface.register(name, torch.compiler.disable(attention))
    for layer in decoder_layers(model):
        layer.forward = torch.compile(layer.forward, backend=backend, dynamic=True)
