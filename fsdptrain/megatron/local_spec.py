"""Norms of megatron-core's plain layers.

Without Transformer Engine, megatron-core uses torch's norm and rejects it under sequence parallelism, because its
weight lacks one attribute.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules


class LocalNorm:
    """Creates torch's RMSNorm where megatron-core would create its own."""

    def __new__(cls, config: "TransformerConfig", hidden_size: int, eps: float = 1e-6) -> nn.Module:
        norm = nn.RMSNorm(hidden_size, eps=eps, dtype=config.params_dtype)
        return mark_sequence_parallel(norm, config)


def mark_sequence_parallel(norm: nn.Module, config: "TransformerConfig") -> nn.Module:
    """Mark the parameters of `norm` for sequence parallelism.

    Each rank then has the gradient of a part of the tokens; megatron-core sums the gradients of marked parameters.
    """
    for parameter in norm.parameters():
        vars(parameter)["sequence_parallel"] = config.sequence_parallel
    return norm


def completed(block: "TransformerBlockSubmodules") -> "TransformerBlockSubmodules":
    """Give megatron-core's plain layers these norms, for runs without Transformer Engine."""
    layers = [_completed(layer) for layer in block.layer_specs or ()]
    return replace(block, layer_specs=layers, layer_norm=LocalNorm)


def _completed(layer: "ModuleSpec") -> "ModuleSpec":
    parts: Any = layer.submodules
    attention = parts.self_attention
    inner = attention.submodules
    changed = {name: LocalNorm for name in ("q_layernorm", "k_layernorm") if _is_norm(vars(inner).get(name))}
    attention = replace(attention, submodules=replace(inner, **changed))
    norms = {name: LocalNorm for name in ("input_layernorm", "pre_mlp_layernorm")}
    return replace(layer, submodules=replace(parts, **norms, self_attention=attention))


def _is_norm(part: object) -> bool:
    """Return whether `part` is a norm, rather than None or megatron-core's IdentityOp."""
    return part is not None and getattr(part, "__name__", "") != "IdentityOp"
