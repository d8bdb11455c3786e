"""Linear layers computed in 8-bit floats by torchao, in training.

Weights, gradients, optimizer and checkpoints stay as they are. The layers change after the probes, which compare
layouts up to rounding: 8-bit floats differ by more.
"""

import logging
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import ConfigError
from fsdptrain.feature import Feature
from fsdptrain.fsdp.mesh import Meshes
from fsdptrain.model.probes.layout import LayoutProbe
from fsdptrain.model.sizes import expert_choice
from fsdptrain.model.structure import decoder_layers

log = logging.getLogger(__name__)

_ADA = (8, 9)  # the first GPUs with products of 8-bit floats
_MULTIPLE = 16  # of inputs and outputs: a limit of the kernels
_LEAST = 32  # inputs and outputs; casts of smaller layers cost more than the product saves
_ROUTERS = {"gate", "router"}  # in the name of a layer; choices should not depend on rounding


class Fp8Feature(Feature):
    def __init__(self) -> None:
        self._found: list[nn.Linear] = []

    @classmethod
    def create(cls, config: Config, checkpoint: Path) -> "Fp8Feature":
        with raise_on_all_ranks(ConfigError, "--fp8"):
            if platform.device_type() == "cuda" and torch.cuda.get_device_capability() < _ADA:
                found = ".".join(map(str, torch.cuda.get_device_capability()))
                raise ConfigError(
                    f"--fp8 needs a GPU of compute capability 8.9 (Ada, Hopper) or later, this one has "
                    f"{found}: remove it"
                )
        return cls()

    def transform_model(self, model: PreTrainedModel, meshes: Meshes) -> None:
        """Find the layers. `verify` changes them."""
        self._found = float8_layers(model)

    def verify(self, model: PreTrainedModel, probe: LayoutProbe, vocab_size: int) -> None:
        for layer in self._found:
            _convert(layer)
        emulated = "" if platform.device_type() == "cuda" else ", emulated"
        log.info(f"fp8 rowwise{emulated}: {len(self._found)} linear layers")


def float8_layers(model: PreTrainedModel) -> list[nn.Linear]:
    """Return the linear layers to compute in 8-bit floats. Raises ConfigError if there are none."""
    inside = {module for layer in decoder_layers(model) for module in layer.modules()}
    choice = expert_choice(model.config)
    found = [
        module
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and module in inside
        and not (_ROUTERS & set(name.split(".")) or (choice and module.out_features == choice.num_experts))
        and all(size >= _LEAST and size % _MULTIPLE == 0 for size in (module.in_features, module.out_features))
    ]
    if not found:
        raise ConfigError(
            f"--fp8: {type(model).__name__} has no linear layer whose inputs and outputs are multiples of "
            f"{_MULTIPLE} and at least {_LEAST}: remove it"
        )
    return found


def _convert(layer: nn.Linear) -> None:
    """Change `layer` to torchao's class in place: FSDP2 refers to the module and its parameters."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    emulate = platform.device_type() != "cuda"
    # The gradient of the weight sums over the tokens of a pack, whose number is no multiple of 16.
    config = replace(Float8LinearConfig.from_recipe_name("rowwise"), pad_inner_dim=True, emulate=emulate)
    with torch.device("meta"):
        like = convert_to_float8_training(nn.Linear(_MULTIPLE, _MULTIPLE, bias=False), config=config)
    assert isinstance(like, nn.Linear)
    own = ("config", "linear_mm_config", "scaling_type_input", "scaling_type_weight", "scaling_type_grad_output")
    vars(layer).update({name: vars(like)[name] for name in own})
    layer.__class__ = type(like)
