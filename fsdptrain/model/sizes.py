"""Read the sizes of a transformers model from its config and modules: of heads, of experts, and what a token uses."""

from typing import NamedTuple

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from fsdptrain.model.structure import decoder_layers, vision_parameters

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts")


class ExpertChoice(NamedTuple):
    """Top-k routing: each token goes to `top_k` of `num_experts`."""

    num_experts: int
    top_k: int


def is_of_adapter(name: str) -> bool:
    """Return whether this is the name of a LoRA parameter of peft.

    `requires_grad` does not tell: stock models have frozen parameters too, such as router biases.
    """
    return ".lora_" in name


def active_sizes(model: PreTrainedModel) -> dict[nn.Parameter, float]:
    """Return the number of elements of each parameter that one text token uses.

    A routed expert counts `top_k / num_experts`.
    """
    unseen = set(vision_parameters(model).values())
    sizes: dict[nn.Parameter, float] = {p: p.numel() for p in model.parameters() if p not in unseen}
    choice = expert_choice(model.config)
    for module in (inner for layer in decoder_layers(model) for inner in layer.modules()):
        fused = not isinstance(module, nn.ModuleList)
        count = num_fused_experts(module) if fused else len(module)
        if choice and count > choice.top_k:
            for p in module.parameters(recurse=not fused):
                if not fused or p.shape[0] == count:  # biases of fused experts also have one row per expert
                    sizes[p] = p.numel() * choice.top_k / count
    return sizes


def layer_config(config: PreTrainedConfig, index: int) -> PreTrainedConfig:
    """Return the config of text layer `index`.

    Where layers differ (Gemma 4), the text config has no head size that holds for all.
    """
    text = config.get_text_config()
    return text.per_layer_config[index] if getattr(text, "is_heterogeneous", False) else text  # transformers >= 5.23


def head_size(config: PreTrainedConfig) -> int:
    """Return `head_dim`, or hidden size / heads for configs that do not set it."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def head_widths(config: PreTrainedConfig) -> tuple[int, int]:
    """Return the head widths (queries and keys, values).

    Multi-head latent attention has two widths, and neither equals `head_size`.
    """
    own = head_size(config)
    return getattr(config, "qk_head_dim", None) or own, getattr(config, "v_head_dim", None) or own


def expert_choice(config: PreTrainedConfig) -> ExpertChoice | None:
    """Return the routing parameters in the config, or None for a model without experts."""
    text = config.get_text_config()
    found = [next((n for n in (getattr(text, key, None) for key in keys) if n), None) for keys in (_EXPERTS, _TOP_K)]
    num_experts, top_k = found
    return ExpertChoice(num_experts, top_k) if num_experts and top_k else None


def num_fused_experts(module: nn.Module) -> int:
    """Return the number of experts fused into the direct parameters of `module`, [E, ., .] each, or 0."""
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return 0
    return next((p.shape[0] for p in module.parameters(recurse=False) if p.dim() == 3), 0)
