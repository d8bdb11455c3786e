"""Which modules of a language model compute what a kernel of liger-kernel computes, and their replacement forward.

No list of model names decides: a stand-in of each module is compared with the formula of the kernel, on the CPU.
Forwards are replaced on instances. The rotary embedding is a function in the file of a family, so the forward of its
attention gets a copy of the file's names with another function; other models of this process keep theirs.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from fsdptrain.model.policy import MODEL_ERRORS
from fsdptrain.model.structure import language_model

_ROPE = "apply_rotary_pos_emb"
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_CASTINGS = ("llama", "gemma")  # casting mode: float32 ends before or after the weight
_WIDTH = 16  # of stand-ins


@dataclass(frozen=True)
class Replacement:
    """A module and what makes its replacement forward; `kernels` is `liger_kernel.ops`."""

    module: nn.Module
    forward: Callable[[Any], Callable[..., Any]]

    def install(self, kernels: Any) -> None:
        self.module.forward = self.forward(kernels)


def find_replacements(model: PreTrainedModel) -> list[Replacement]:
    """Return the modules of the language model to replace. The model may be on meta, not sharded."""
    return [found for module in language_model(model).modules() for found in _replacements(module)]


def describe(replacements: list[Replacement]) -> str:
    """Return the classes with their numbers: `9 Qwen3RMSNorm, 4 Qwen3Attention, 4 Qwen3MLP`."""
    counts = Counter(type(replacement.module).__name__ for replacement in replacements)
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _replacements(module: nn.Module) -> Iterator[Replacement]:
    if "forward" in vars(module):  # of another feature
        return
    forward = type(module).forward
    if isinstance(forward, FunctionType) and _ROPE in forward.__code__.co_names and _is_rope(forward):
        yield Replacement(module, partial(_attention_forward, module, forward))
    elif all(isinstance(getattr(module, name, None), nn.Module) for name in (*_PROJECTIONS, "act_fn")):
        kernel = next((name for name, product in _PRODUCTS.items() if _is_gated_mlp(module, product)), None)
        if kernel is not None:
            yield Replacement(module, partial(_mlp_forward, module, kernel))
    elif "RMSNorm" in type(module).__name__ and [name for name, _ in module.named_parameters()] == ["weight"]:
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        variant = _norm_variant(module, eps) if isinstance(eps, float) else None
        if variant is not None:
            yield Replacement(module, partial(_norm_forward, module, eps, *variant))


def _norm_forward(module: nn.Module, eps: float, offset: float, casting: str, kernels: Any) -> Callable[..., Any]:
    def forward(hidden_states: Tensor) -> Tensor:
        # False: do not write the gradient over that of the output, which a residual may need too
        return kernels.LigerRMSNormFunction.apply(hidden_states, module.weight, eps, offset, casting, False)

    return forward


def _mlp_forward(module: Any, kernel: str, kernels: Any) -> Callable[..., Any]:
    def forward(x: Tensor) -> Tensor:
        return module.down_proj(getattr(kernels, kernel).apply(module.gate_proj(x), module.up_proj(x)))

    return forward


def _attention_forward(module: nn.Module, forward: FunctionType, kernels: Any) -> Callable[..., Any]:
    stock = forward.__globals__[_ROPE]

    def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **options: Any) -> tuple[Tensor, Tensor]:
        if more or options:
            return stock(q, k, cos, sin, *more, **options)
        # The kernel writes over its inputs without autograd's knowledge; selective checkpointing keeps them.
        return kernels.LigerRopeFunction.apply(q.clone(), k.clone(), cos, sin)

    names = {**forward.__globals__, _ROPE: rope}
    own = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    own.__kwdefaults__ = forward.__kwdefaults__
    return MethodType(own, module)


_PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "LigerSiLUMulFunction": lambda gate, up: F.silu(gate) * up,
    "LigerGELUMulFunction": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
}


def _is_rope(forward: FunctionType) -> bool:
    q, k, angles = _random(1, 4, 3, _WIDTH), _random(1, 2, 3, _WIDTH), _random(1, 3, _WIDTH // 2)
    cos, sin = (f(torch.cat([angles, angles], dim=-1)) for f in (torch.cos, torch.sin))

    def wanted(x: Tensor) -> Tensor:
        low, high = x.chunk(2, dim=-1)
        return x * cos[:, None] + torch.cat([-high, low], dim=-1) * sin[:, None]

    def agrees() -> bool:
        found = forward.__globals__[_ROPE](q, k, cos, sin)
        return all(torch.allclose(x, wanted(y), atol=1e-5) for x, y in zip(found, (q, k), strict=True))

    return _holds(agrees)


def _is_gated_mlp(module: nn.Module, product: Callable[[Tensor, Tensor], Tensor]) -> bool:
    stand_in: Any = copy.copy(module)
    sizes = ((_WIDTH, 2 * _WIDTH), (_WIDTH, 2 * _WIDTH), (2 * _WIDTH, _WIDTH))
    linears = {name: nn.Linear(*size, device="cpu") for name, size in zip(_PROJECTIONS, sizes, strict=True)}
    stand_in._modules = {**module._modules, **linears}
    for linear in linears.values():
        linear.weight.data = _random(*linear.weight.shape)
    x = _random(3, _WIDTH)

    def agrees() -> bool:
        wanted = stand_in.down_proj(product(stand_in.gate_proj(x), stand_in.up_proj(x)))
        return torch.allclose(stand_in(x), wanted, atol=1e-4)

    return _holds(agrees)


def _norm_variant(module: nn.Module, eps: float) -> tuple[float, str] | None:
    """Return (what is added to the weight, casting mode), as the kernel calls them."""
    stand_in: Any = copy.copy(module)
    weight = _random(*module.get_parameter("weight").shape).bfloat16()
    stand_in._parameters = {"weight": nn.Parameter(weight)}
    x = _random(64, len(weight)).bfloat16()

    def error(offset: float, casting: str) -> float:
        normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
        if casting == "llama":
            wanted = (weight + offset) * normed.bfloat16()
        else:
            wanted = ((weight.float() + offset) * normed).bfloat16()
        return ((stand_in(x) - wanted).abs().max() / wanted.abs().max()).item()

    def nearest() -> tuple[float, str] | None:
        variants = [(offset, casting) for casting in _CASTINGS for offset in (0.0, 1.0)]
        errors = [error(*variant) for variant in variants]
        best = min(errors)
        return variants[errors.index(best)] if best <= torch.finfo(torch.bfloat16).eps else None

    return _holds(nearest) or None


@torch.no_grad()
def _holds(agrees: Callable[[], Any]) -> Any:
    """Call `agrees`. A module that takes other arguments does not agree."""
    try:
        return agrees()
    except MODEL_ERRORS:
        return False


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), device="cpu")
