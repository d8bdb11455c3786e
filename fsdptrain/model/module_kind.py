"""The kind of a module, by its class name."""

import re

from torch import nn

from fsdptrain.model.structure import num_fused_experts

_EXPERTS = re.compile(r"Experts?$")
_RECURRENT = re.compile(
    r"DeltaNet|DeltaAttention|Mamba|SSM|Mixer$|Recurrent|ShortConv|LinearAttention|Lightning|Rwkv|xLSTM|Retention"
)


def module_kind(module: nn.Module) -> str:
    """Return `experts`, `recurrent mixer` or `other`."""
    name = type(module).__name__
    if name.startswith("FSDP"):
        name = type(module).__mro__[2].__name__
    if num_fused_experts(module) or _EXPERTS.search(name):
        return "experts"
    return "recurrent mixer" if _RECURRENT.search(name) and "Norm" not in name else "other"
