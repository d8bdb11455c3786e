"""AdamW of torchao with moments in 8 bits: 2.03 bytes of state per element of a matrix, in place of 8.

Blocks of 256 elements share a float32 scale (Dettmers et al. 2021, arXiv 2110.02861). torchao cuts the blocks out of
the flat shard of each rank. Here a block lies within one row of the whole matrix: scales are a DTensor with the
sharding of the weight, and a run resumes on other numbers of ranks. Other parameters keep float32 moments: those with
fewer than 4096 elements, as in torchao, those whose rows are not a multiple of a block, and stacked experts that are
sharded along columns (`wrap.expert_placement`). Where other ranks shard these along rows, a resume is rejected.
"""

import math
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torchao.optim import AdamW8bit
from torchao.optim.subclass_8bit import OptimState8bit

from fsdptrain.config import OptimConfig
from fsdptrain.fsdp.optimizers import Groups
from fsdptrain.fsdp.shards import local_shard

LEAST = 4096  # elements of a parameter with 8-bit moments; as in torchao
BLOCK = 256


def adamw8bit(groups: Groups, options: OptimConfig) -> torch.optim.Optimizer:
    """Create the optimizer. On a CPU its steps are not compiled, so that they need no C++ compiler."""
    found = RowBlockAdamW8bit(
        groups,
        lr=options.lr,
        betas=(options.adam_beta1, options.adam_beta2),
        eps=options.adam_eps,
        weight_decay=options.weight_decay,
        block_size=BLOCK,
    )
    for group in found.param_groups:
        for p in group["params"]:
            first, second = found._new_buffer(p, True), found._new_buffer(p, False)
            found.state[p] = {"step": torch.tensor(0.0), "exp_avg": first, "exp_avg_sq": second}
    return found


def is_quantized(p: Tensor) -> bool:
    """Return whether the moments of `p` have 8 bits, the same on every rank."""
    by_rows = not isinstance(p, DTensor) or all(x.dim == 0 for x in p.placements if isinstance(x, Shard))
    return by_rows and p.numel() >= LEAST and math.prod(p.shape[1:]) % BLOCK == 0


class RowBlockAdamW8bit(AdamW8bit):
    """torchao's AdamW8bit, with blocks that do not depend on the sharding."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        params = [p for group in self.param_groups for p in group["params"]]
        empty = [p for p in params if not local_shard(p).numel()]  # torchao divides by their number of blocks
        for p in empty:
            p.grad = None
            self.state[p]["step"] += 1
        eager = params[0].device.type == "cpu"
        with torch.compiler.set_stance("force_eager" if eager else "default"):
            super().step()

    def stored(self, p: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter as plain tensors and DTensors: uint8 codes, and scales [rows, blocks]."""
        state = self.state[cast(Any, p)]
        if not is_quantized(p):
            return state
        found: dict[str, Tensor] = {"step": state["step"]}
        blocks = math.prod(p.shape[1:]) // BLOCK  # of a row
        for key in ("exp_avg", "exp_avg_sq"):
            codes = scale = local_shard(state[key])  # of an empty shard: without blocks
            if isinstance(codes, OptimState8bit):
                codes, scale = codes.codes, codes.scale
            found[f"{key}.codes"] = _like(codes, p, p.shape)
            found[f"{key}.scale"] = _like(scale.float().view(-1, blocks), p, torch.Size((p.shape[0], blocks)))
        return found

    def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
        local = local_shard(p)
        if not is_quantized(p):
            return torch.zeros_like(p, requires_grad=False)
        if not local.numel():
            return torch.zeros_like(p, requires_grad=False, dtype=torch.uint8)
        state = OptimState8bit.zeros(local.shape, signed, BLOCK, local.device, dtype=local.dtype)
        return _like(state, p, p.shape)


def _like(local: Tensor, p: Tensor, shape: torch.Size) -> Tensor:
    """Return `local` as this rank's part of a tensor of `shape`, sharded like `p`."""
    if not isinstance(p, DTensor):
        return local
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, p.device_mesh, p.placements, run_check=False, shape=shape, stride=stride)
