"""A linear layer with a frozen weight in 4 bits, and the arithmetic of bitsandbytes that it uses.

NF4 is the data type of QLoRA (Dettmers et al. 2023, arXiv 2305.14314). 64 neighbors of a row share a scale. A block
never leaves its row, so that FSDP2 shards the codes along rows, and the weights do not depend on the number of ranks.

    codes    [out, in / 2] uint8
    scales   [out, in / 64] int32: the bits of float32, which mixed precision would round to bfloat16
"""

from typing import Any

import torch
from bitsandbytes import functional
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdptrain import platform
from fsdptrain.model.loading.fill import filled_like
from fsdptrain.model.loading.materialize import local_part

BLOCK = 64  # weights of a row that share a scale
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # that bitsandbytes computes with


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return (codes, scales) of `weight` [rows, in]."""
    rows, columns = weight.shape
    if not rows:
        codes, scales = columns // 2, columns // BLOCK
        return weight.new_empty((0, codes), dtype=torch.uint8), weight.new_empty((0, scales), dtype=torch.int32)
    weight = weight.contiguous() if weight.dtype in _DTYPES else weight.float().contiguous()
    codes, state = functional.quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4")
    return codes.view(rows, -1), state.absmax.view(rows, -1).view(torch.int32)


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight [rows, in] in `dtype`."""
    rows, columns = codes.shape[0], BLOCK * scales.shape[1]
    if not rows:
        return codes.new_empty((0, columns), dtype=dtype)
    state = functional.QuantState(
        absmax=scales.view(torch.float32).view(-1),
        shape=torch.Size((rows, columns)),
        blocksize=BLOCK,
        quant_type="nf4",
        dtype=dtype if dtype in _DTYPES else torch.float32,
    )
    return functional.dequantize_4bit(codes.view(-1, 1), state).to(dtype)


class _FrozenProduct(torch.autograd.Function):
    """x W^T, where W is dequantized in the forward pass and again in the backward pass. Saves codes and scales."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        ctx.save_for_backward(codes, scales)
        return x @ dequantize(codes, scales, x.dtype).mT

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        [gradient] = gradients
        if not ctx.needs_input_grad[0]:
            return None, None, None
        codes, scales = ctx.saved_tensors
        return gradient @ dequantize(codes, scales, gradient.dtype), None, None


class QuantizedLinear(nn.Linear):
    """A linear layer whose weight is `codes` and `scales`.

    In its stock form it has a parameter `weight` like that of nn.Linear. Before loading that is on meta; what a loader
    sets is quantized at once, and replaced by a tensor without memory. So each rank holds one weight of its shard in
    full precision at a time.
    """

    codes: nn.Parameter
    scales: nn.Parameter
    _stored_dtype: torch.dtype
    _aside: dict[str, nn.Parameter | None]

    @classmethod
    def convert(cls, linear: nn.Linear) -> "QuantizedLinear":
        """Change `linear`, on meta and not sharded yet, in place."""
        dtype, (rows, columns) = linear.weight.dtype, linear.weight.shape
        linear.__class__ = cls
        assert isinstance(linear, QuantizedLinear)
        del linear.weight
        linear._stored_dtype, linear._aside = dtype, {"weight": None}
        linear.codes = _frozen(torch.empty(rows, columns // 2, dtype=torch.uint8, device="meta"))
        linear.scales = _frozen(torch.empty(rows, columns // BLOCK, dtype=torch.int32, device="meta"))
        return linear

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        product = _FrozenProduct.apply(x, self.codes, self.scales)
        return product if self.bias is None else product + self.bias

    def swap(self) -> None:
        """Change to the stock form, or back."""
        here = {name: self._parameters.pop(name) for name in ("weight", "codes", "scales") if name in self._parameters}
        aside, self._aside = self._aside, here
        if "weight" in aside and aside["weight"] is None:
            codes = here["codes"]
            assert codes is not None
            local = torch.empty(local_part(codes).shape[0], self.in_features, dtype=self._stored_dtype, device="meta")
            aside["weight"] = _frozen(self._like_codes(local))
        self._parameters.update(aside)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and not local_part(value).is_meta:
            value = self._taken(value)
        super().__setattr__(name, value)

    def full_precision(self) -> Tensor:
        """Return the weight in float32, sharded as the codes are."""
        codes, scales = (local_part(p.detach()) for p in (self.codes, self.scales))
        return self._like_codes(dequantize(codes, scales, torch.float32))

    def _taken(self, weight: Tensor) -> nn.Parameter:
        """Quantize this rank's rows of `weight`. Returns a parameter of the same shape without memory."""
        device = platform.local_device()
        local = local_part(weight.detach()).to(device)
        for name, part in zip(("codes", "scales"), quantize(local), strict=True):
            meta = self._aside[name]
            assert meta is not None
            self._aside[name] = filled_like(meta, part, device)
        placeholder = _frozen(self._like_codes(local.new_empty(()).expand(local.shape)))
        vars(placeholder).update(vars(weight))  # the mark of the loader of transformers
        return placeholder

    def _like_codes(self, local: Tensor) -> Tensor:
        codes = self._parameters.get("codes", self._aside.get("codes"))
        if not isinstance(codes, DTensor):
            return local
        shape = (self.out_features, self.in_features)
        stride = (self.in_features, 1)
        return DTensor.from_local(
            local, codes.device_mesh, codes.placements, run_check=False, shape=torch.Size(shape), stride=stride
        )


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
