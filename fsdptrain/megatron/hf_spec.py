"""Layers for models that megatron-core does not support: megatron-core blocks with transformers mixers and norms.

    input_layernorm    the transformers norm: megatron-core's plain norm does not support (1 + w)
    self_attention     the transformers mixer (hf_mixer.py), for any layer type
    pre_mlp_layernorm  the transformers norm
    mlp                megatron-core's MLP: dense, or experts over expert-parallel ranks

Transformer Engine fuses norms into the following matrices. These norms are removed here, so that each appears once.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedConfig

from fsdptrain.megatron import model as own
from fsdptrain.megatron.cpu_shims import quiet_megatron
from fsdptrain.megatron.hf_mixer import HFMixer
from fsdptrain.megatron.hf_modules import HFModules, hf_modules
from fsdptrain.megatron.local_spec import mark_sequence_parallel
from fsdptrain.megatron.transformer_config import refuse_split_mixers

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules


class HFNorm:
    """Creates the transformers norm where megatron-core would create its own."""

    def __new__(
        cls, config: "TransformerConfig", hidden_size: int, eps: float = 1e-6, *, modules: HFModules
    ) -> nn.Module:
        return mark_sequence_parallel(modules.norm_class(hidden_size, eps=eps).to(config.params_dtype), config)


def layer_spec(
    transformer_config: "TransformerConfig", hf_config: PreTrainedConfig, *, vp_stage: int | None = None
) -> "TransformerBlockSubmodules":
    """Return the layers of this rank's stage. Raises ConfigError if tensor parallelism would have to shard a mixer."""
    with quiet_megatron():
        from megatron.core.transformer.spec_utils import ModuleSpec

    size, sequence = transformer_config.tensor_model_parallel_size, transformer_config.sequence_parallel
    refuse_split_mixers(hf_config, size, sequence=sequence)
    modules = hf_modules(hf_config)
    norm = ModuleSpec(module=HFNorm, params={"modules": modules})
    mixer = ModuleSpec(module=HFMixer, params={"modules": modules})
    block = own.layer_spec(transformer_config, hf_config, vp_stage=vp_stage)
    layers = [_wrapped(layer, norm=norm, mixer=mixer) for layer in block.layer_specs or ()]
    return replace(block, layer_specs=layers, layer_norm=norm)


def _wrapped(layer: "ModuleSpec", *, norm: "ModuleSpec", mixer: "ModuleSpec") -> "ModuleSpec":
    parts: Any = layer.submodules
    changed = replace(
        parts, input_layernorm=norm, self_attention=mixer, pre_mlp_layernorm=norm, mlp=_without_norm(parts.mlp)
    )
    changed.sharded_state_dict_keys_map = {}  # maps names of fused norms
    return replace(layer, submodules=changed)


def _without_norm(mlp: "ModuleSpec") -> "ModuleSpec":
    """Replace a Transformer Engine matrix with a fused norm by the one without a norm."""
    if not own.has_transformer_engine():
        return mlp
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    fused, plain = TESpecProvider().column_parallel_layer_norm_linear(), TESpecProvider().column_parallel_linear()
    parts: Any = mlp.submodules
    if vars(parts).get("linear_fc1") is not fused:
        return mlp
    return replace(mlp, submodules=replace(parts, linear_fc1=plain))
