"""Parts that megatron-core's plain layers lack: norms for sequence parallelism, and DeepSeek's attention.

Without Transformer Engine, megatron-core uses torch's norm and rejects it under sequence parallelism, because its
weight lacks one attribute. Its attention requires queries and values of the same size.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn

from fsdptrain.errors import NumericsError
from fsdptrain.megatron.cpu_shims import replace_name

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


class LatentCoreAttention(nn.Module):
    """Softmax attention whose queries and keys have larger heads than its values, as in DeepSeek's latent attention."""

    def __init__(self, config: "TransformerConfig", *, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,  # [S, B, H, D]
        key: Tensor,
        value: Tensor,  # [S, B, H, V]
        attention_mask: Tensor,  # [1, 1, S, S], True where masked out
        *,
        packed_seq_params: object = None,
        **_: Any,
    ) -> Tensor:
        """Return [S, B, H V]."""
        if packed_seq_params is not None:
            raise NumericsError("plain latent attention was given a packed row, whose boundaries it does not know")
        rows = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = F.scaled_dot_product_attention(*rows, attn_mask=~attention_mask, scale=self.softmax_scale)
        return out.permute(2, 0, 1, 3).flatten(2)


def completed(block: "TransformerBlockSubmodules") -> "TransformerBlockSubmodules":
    """Complete megatron-core's plain layers with the parts of this file, for runs without Transformer Engine."""
    layers = [_completed(layer) for layer in block.layer_specs or ()]
    return replace(block, layer_specs=layers, layer_norm=LocalNorm)


def _completed(layer: "ModuleSpec") -> "ModuleSpec":
    parts: Any = layer.submodules
    attention = parts.self_attention
    inner = attention.submodules
    changed: dict[str, Any] = {name: LocalNorm for name in _NORMS if _is_norm(vars(inner).get(name))}
    if "linear_kv_down_proj" in vars(inner):
        from megatron.core.transformer import multi_latent_attention

        # 0.16 sets it to True without the package, since a module that only refers to it imports, and then uses its
        # classes
        replace_name(multi_latent_attention, "HAVE_TE", False)
        changed["core_attention"] = LatentCoreAttention
    attention = replace(attention, submodules=replace(inner, **changed))
    norms = {name: LocalNorm for name in ("input_layernorm", "pre_mlp_layernorm")}
    return replace(layer, submodules=replace(parts, **norms, self_attention=attention))


_NORMS = ("q_layernorm", "k_layernorm", "kv_layernorm")


def _is_norm(part: object) -> bool:
    """Return whether `part` is a norm, rather than None or megatron-core's IdentityOp."""
    return part is not None and getattr(part, "__name__", "") != "IdentityOp"
