"""Find the transformers modules for megatron-core layers: mixers, norm and rotary table.

Classes are not listed by name: the model is built on meta, and the classes are taken from its layers.
"""

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from fsdptrain import platform
from fsdptrain.errors import ConfigError
from fsdptrain.features.context_parallel.recurrent import has_state
from fsdptrain.model.architecture import model_from_config
from fsdptrain.model.attention.attention import OURS, resolve_attention
from fsdptrain.model.module_kind import module_kind
from fsdptrain.model.structure import base_model, decoder_layers

_MIXERS = ("attention", "recurrent mixer")
_NORMS = ["input_layernorm", "post_attention_layernorm"]  # before the mixer, and before the MLP
_WAY_OUT = "use --backend fsdp, or --megatron-spec with layers of your own"


@dataclass(frozen=True)
class Mixer:
    """The module that replaces `self_attention` in one layer."""

    module_class: type[nn.Module]
    hub_name: str  # name in the transformers layer and in the files: self_attn, linear_attn
    is_recurrent: bool  # carries a state along the sequence
    takes_angles: bool


@dataclass(frozen=True)
class HFModules:
    """The modules of one model, for all layers of all stages."""

    config: PreTrainedConfig  # a copy, with an attention that uses no dense masks
    mixers: tuple[Mixer, ...]  # by layer
    norm_class: type[nn.Module]
    rotary_class: type[nn.Module]

    def make_mixer(self, layer: int, dtype: torch.dtype) -> nn.Module:
        """Create the mixer of `layer`, counted from 0, without loading its weights.

        Creates it on this rank's device, or on meta in a meta device context.
        """
        around = torch.get_default_device()
        with around if around.type == "meta" else platform.local_device():
            module = self.mixers[layer].module_class(self.config, layer)
        module.to(dtype)
        return module


def hf_modules(hf_config: PreTrainedConfig) -> HFModules:
    """Find the modules of a model. Raises ConfigError unless its layers are norm, mixer, norm, MLP."""
    config = copy.deepcopy(hf_config)
    config.use_cache = False
    asked = str(config._attn_implementation)
    attention = asked if asked in OURS or "flash" in asked else resolve_attention("auto", platform.device_type())
    config._attn_implementation = attention
    with torch.device("meta"):
        model = model_from_config(config, dtype=torch.float32, attn_implementation=attention)
    layers = decoder_layers(model)
    norms = {type(norm) for layer in layers for norm in _norms(layer)} | {type(n) for n in _norms(base_model(model))}
    rotary = {type(part) for part in base_model(model).children() if module_kind(part) == "rotary table"}
    wrong = [layer for layer in layers if [name for name, _ in _named(layer, ("norm",))] != _NORMS]
    if wrong or len(norms) != 1 or len(rotary) != 1:
        name = type((wrong or layers)[0]).__name__
        raise ConfigError(
            f"--backend megatron: {name} is not norm, mixer, norm and MLP with one class of norms and one table of "
            f"angles: {_WAY_OUT}"
        )
    return HFModules(config, _mixers(model, layers), norms.pop(), rotary.pop())


def _mixers(model: PreTrainedModel, layers: Sequence[nn.Module]) -> tuple[Mixer, ...]:
    found = []
    for layer in layers:
        parts = _named(layer, _MIXERS)
        if len(parts) != 1:
            names = ", ".join(name for name, _ in parts) or "none"
            raise ConfigError(
                f"--backend megatron: {type(layer).__name__} of {type(model).__name__} must have one mixer, it has "
                f"{names}: {_WAY_OUT}"
            )
        ((hub_name, module),) = parts
        angles = "position_embeddings" in inspect.signature(type(module).forward).parameters
        found.append(Mixer(type(module), hub_name, any(map(has_state, module.modules())), angles))
    return tuple(found)


def _norms(module: nn.Module) -> list[nn.Module]:
    return [part for _, part in _named(module, ("norm",))]


def _named(module: nn.Module, kinds: Sequence[str]) -> list[tuple[str, nn.Module]]:
    return [(name, part) for name, part in module.named_children() if module_kind(part) in kinds]
