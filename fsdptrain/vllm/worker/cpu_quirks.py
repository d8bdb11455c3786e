"""What vLLM 0.32 gets wrong on CPUs.

It packs linear layers and experts for its kernels. After an update a tied head keeps its old packed copy, and experts
are read as if they were still packed.
"""

import platform
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def request_amx() -> None:
    """Ask Linux for a CPU's matrix tiles (AMX).

    vLLM's attention in bfloat16 uses them without asking, which ends the process with an illegal instruction.
    """
    if platform.machine() == "x86_64" and torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def tied_heads(model: nn.Module) -> dict[str, nn.Module]:
    """Heads that share the weight of an embedding, by name. Some models of vLLM do not tie what the checkpoint ties."""
    named = model.named_parameters(remove_duplicate=False)
    embeddings = {p.data_ptr() for name, p in named if "embed" in name and p.numel()}  # packed layers keep no weight
    heads: dict[str, Any] = {n: module for n, module in model.named_modules() if n.rpartition(".")[2] == "lm_head"}
    return {
        name: head for name, head in heads.items() if hasattr(head, "weight") and head.weight.data_ptr() in embeddings
    }


def repack(heads: Iterable[Any]) -> None:
    """Pack tied heads again: vLLM packs only layers that received weights, and a tied head receives none."""
    for head in heads:
        if hasattr(head, "cpu_linear"):
            head.quant_method.process_weights_after_loading(head)


def forget_kernels(model: nn.Module) -> None:
    """Before an update: remove the kernels of packed experts, so that vLLM packs the new weights as it did at first.

    [vLLM 0.32, `UnquantizedFusedMoEMethod._setup_kernel`]
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        experts: Any = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
        if type(experts).__name__ == "CPUUnquantizedExperts" and not experts._use_zentorch:
            method.moe_kernel = None
