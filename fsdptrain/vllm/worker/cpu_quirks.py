"""What vLLM 0.32 forgets on CPUs when weights are loaded a second time.

It packs linear layers and experts for its kernels. After an update a tied head keeps its old packed copy, and experts
are read as if they were still packed.
"""

import platform
from typing import Any

import torch
from torch import Tensor, nn

_DIGIT = 8  # bits: every dtype, also bfloat16, holds such a number exactly


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


def repack_tied_head(model: nn.Module) -> None:
    """Pack tied heads again: vLLM packs only layers that received weights, and a tied head receives none."""
    for module in tied_heads(model).values():
        head: Any = module
        if hasattr(head, "cpu_linear"):
            head.quant_method.process_weights_after_loading(head)


def forget_kernels(model: nn.Module) -> dict[str, Any]:
    """Before an update: remove the kernels of packed experts, so that vLLM packs the new weights as it did at first.

    Returns them by module. [vLLM 0.32, `UnquantizedFusedMoEMethod._setup_kernel`]
    """
    kernels = {}
    for name, module in model.named_modules():
        if packing_of(module) is not None:
            method: Any = module.quant_method
            kernels[name], method.moe_kernel = method.moe_kernel, None
    return kernels


def restore_kernels(model: nn.Module, kernels: dict[str, Any]) -> None:
    """After an update: experts that got no weights keep theirs, and need their kernel again."""
    for name, kernel in kernels.items():
        method: Any = model.get_submodule(name).quant_method
        if method.moe_kernel is None:
            method.moe_kernel = kernel


def packing_of(module: nn.Module) -> str | None:
    """The instruction set that the experts of `module` are packed for, in vLLM's words. None: they are not packed."""
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports] - an extra

    kernel: Any = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
    if kernel is None or not current_platform.is_cpu():
        return None
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import (  # pyright: ignore[reportMissingImports]
        CPUUnquantizedExperts,
    )

    experts = kernel.fused_experts
    is_packed = isinstance(experts, CPUUnquantizedExperts) and not experts._use_zentorch
    return experts.isa if is_packed else None


class Unpacker:
    """Undoes the packing of one expert's matrix. Caches the permutation of each shape."""

    def __init__(self) -> None:
        self._orders: dict[Any, Tensor] = {}

    def unpack(self, packed: Tensor, packing: str) -> Tensor:
        """[out, in]"""
        key = packed.shape, packed.dtype, packing
        if key not in self._orders:
            self._orders[key] = _order(packed, packing)
        plain = torch.empty(packed.numel(), dtype=packed.dtype)
        plain[self._orders[key]] = packed.flatten()
        return plain.view(packed.shape)


def _order(like: Tensor, packing: str) -> Tensor:
    """[out * in] i64: the index of the plain element at each place of a packed matrix.

    Found by packing matrices that hold the digits of each element's index.
    """
    from vllm._custom_ops import cpu_prepack_moe_weight  # pyright: ignore[reportMissingImports] - an extra

    numbers, order = torch.arange(like.numel()), torch.zeros(like.numel(), dtype=torch.int64)
    for shift in range(0, like.numel().bit_length(), _DIGIT):
        digits = (numbers >> shift & (1 << _DIGIT) - 1).to(like.dtype).view(1, *like.shape)
        order |= cpu_prepack_moe_weight(digits, packing).flatten().long() << shift
    return order
