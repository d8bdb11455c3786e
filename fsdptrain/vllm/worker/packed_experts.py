"""A trap of vLLM on CPUs: it packs experts for their kernel when they are loaded first, and never again.

After an update the kernel would read plain weights as if they were packed, and answer nonsense. And packed experts are
taken apart again here, so that they can be compared with what was sent.

Imported in vLLM's own processes too: beside vLLM it needs torch and nothing else.
"""

from typing import Any

import torch
from torch import Tensor, nn

_DIGIT = 8  # bits of a number that every dtype holds exactly, bfloat16 too


def forget_kernels(model: nn.Module) -> dict[str, Any]:
    """Before new weights are loaded: kernels of packed experts, by the module. Without one vLLM makes it anew when
    weights have come, and packs them as it did at first. [vLLM 0.32, `UnquantizedFusedMoEMethod._setup_kernel`]"""
    kernels = {}
    for name, module in model.named_modules():
        if packing_of(module) is not None:
            method: Any = module.quant_method
            kernels[name], method.moe_kernel = method.moe_kernel, None
    return kernels


def restore_kernels(model: nn.Module, kernels: dict[str, Any]) -> None:
    """After new weights were loaded: experts that got none keep theirs, and `kernels` of before."""
    for name, kernel in kernels.items():
        method: Any = model.get_submodule(name).quant_method
        if method.moe_kernel is None:
            method.moe_kernel = kernel


def packing_of(module: nn.Module) -> str | None:
    """The instruction set for which the experts of `module` are packed, as vLLM calls it. None: they are not."""
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports] - an extra

    kernel: Any = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
    if kernel is None or not current_platform.is_cpu():
        return None
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import (  # pyright: ignore[reportMissingImports]
        CPUUnquantizedExperts,
    )

    experts = kernel.fused_experts
    packs = isinstance(experts, CPUUnquantizedExperts) and not experts._use_zentorch
    return experts.isa if packs else None


class Unpacker:
    """Undoes the packing of one expert's matrix. Remembers where the elements of each shape have gone."""

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
    """Which element of a plain matrix lies at each place of a packed one. vLLM itself says: it is given a matrix that
    holds the digits of the number of each element, digit by digit. [out * in] i64"""
    from vllm._custom_ops import cpu_prepack_moe_weight  # pyright: ignore[reportMissingImports] - an extra

    numbers, order = torch.arange(like.numel()), torch.zeros(like.numel(), dtype=torch.int64)
    for shift in range(0, like.numel().bit_length(), _DIGIT):
        digits = (numbers >> shift & (1 << _DIGIT) - 1).to(like.dtype).view(1, *like.shape)
        order |= cpu_prepack_moe_weight(digits, packing).flatten().long() << shift
    return order
