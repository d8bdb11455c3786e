"""What vLLM 0.32 gets wrong on CPUs.

It packs linear layers and experts for its kernels. After an update a tied head keeps its old packed copy, and experts
are read as if they were still packed.
"""

import platform
from collections.abc import Iterable
from functools import lru_cache
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
        if packing_of(module) is not None:
            method: Any = module.quant_method
            method.moe_kernel = None


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


def unpack(packed: Tensor, packing: str) -> Tensor:
    """Undo the packing of one expert's matrix. [out, in]"""
    plain = torch.empty_like(packed).flatten()
    plain[_order(packed.shape, packed.dtype, packing)] = packed.flatten()
    return plain.view(packed.shape)


def forget_orders() -> None:
    """Free what `unpack` keeps: 8 bytes for each element of two matrices."""
    _order.cache_clear()


@lru_cache(maxsize=2)  # the two matrices of an expert
def _order(shape: torch.Size, dtype: torch.dtype, packing: str) -> Tensor:
    """[out * in] i64: the index of the plain element at each place of a packed matrix.

    Found by packing matrices that hold the digits of each element's index.
    """
    from vllm._custom_ops import cpu_prepack_moe_weight  # pyright: ignore[reportMissingImports] - an extra

    numbers, order = torch.arange(shape.numel()), torch.zeros(shape.numel(), dtype=torch.int64)
    for shift in range(0, shape.numel().bit_length(), _DIGIT):
        digits = (numbers >> shift & (1 << _DIGIT) - 1).to(dtype).view(1, *shape)
        order |= cpu_prepack_moe_weight(digits, packing).flatten().long() << shift
    return order
