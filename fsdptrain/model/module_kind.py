"""The kind of a module, by its class name."""

import re

from torch import nn

from fsdptrain.model.structure import num_fused_experts

# Kind of a module by its class name; the first matching pattern wins.
_KINDS = {
    "norm": r"Norm",
    "rotary table": r"Rotary|RoPE|Rope",
    "embedding": r"Embedding",
    "router": r"Router|Gate$|TopKGate",
    "experts": r"Experts?$",
    "recurrent mixer": r"DeltaNet|DeltaAttention|Mamba|SSM|Mixer$|Recurrent|ShortConv|LinearAttention|Lightning|Rwkv"
    r"|xLSTM|Retention",
    "attention": r"Attention|Attn$",
    "MLP": r"MLP|Mlp|FeedForward|FFN|MoE|Moe|Sparse|Dense",
    "linear": r"Linear$|Conv1D$",
}
MIXTURE = "mixture of experts"  # contains experts; its children are listed too


def module_kind(module: nn.Module) -> str:
    """Return the kind of a module, such as `attention`, `norm` or `experts`; `other` for unknown class names."""
    name = type(module).__name__
    if name.startswith("FSDP"):
        name = type(module).__mro__[2].__name__
    if num_fused_experts(module):
        return "experts"
    kind = next((kind for kind, pattern in _KINDS.items() if re.search(pattern, name)), "other")
    return MIXTURE if kind in {"MLP", "other"} and any(_are_experts(child) for child in module.children()) else kind


def _are_experts(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList) or module_kind(module) == "experts"
