"""The tokens of a pack dealt over a group of ranks, so that one sequence may be longer than a device can hold.

Rank r of N has columns r, r + N, r + 2N ... of the model's rows: dealt one by one, every rank has its share of any
prompt and of any response. What treats tokens one by one (norms, MLPs, routers, the head) runs as it is, on 1/N of
them. Attention sees whole sequences and 1/N of the heads: one all-to-all before it and one after (DeepSpeed-Ulysses,
arXiv 2309.14509). So boundaries, windows and sinks are what they are without, and no rank waits for another whatever
the mask.

What the model says of its tokens is a number each: `total` lets every rank know all of them. All then compute the same
loss, of sequences too, and each keeps the gradient of its own tokens. FSDP sums that of the parameters.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsdptrain.errors import NumericsError


@dataclass(frozen=True)
class UlyssesGroup:
    """The ranks over which the tokens of a pack are dealt. S: columns of all of them, s = S / size those of one."""

    group: dist.ProcessGroup
    rank: int  # in the group
    size: int

    @classmethod
    def of(cls, mesh: DeviceMesh) -> "UlyssesGroup":
        return cls(mesh.get_group(), mesh.get_local_rank(), mesh.size())

    def own_columns(self, rows: Tensor) -> Tensor:
        """[B, S, ...] -> [B, s, ...]"""
        return rows[:, self.rank :: self.size]

    def all_columns(self, rows: Tensor) -> Tensor:
        """[B, s, ...] of each rank -> [B, S, ...]. Backward sums over the ranks, each of which may use all of it."""
        return _columns(_AllGather.apply(rows, self.group))

    def total(self, values: Tensor) -> Tensor:
        """The sum over the ranks, of which each makes the same: so the gradient of the sum is that of its own part."""
        return _Total.apply(values, self.group)

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """[B, H, s, D] of all heads -> [B, H / size, S, D] of this rank's. One all-to-all for the three.

        Where ranks are more than key-value heads, or do not divide them, these are repeated as often as is needed.
        """
        heads = query.shape[1]
        if heads % self.size:
            raise NumericsError(
                f"--context-parallel-size {self.size} must divide the {heads} attention heads of a layer"
            )
        repeats = repeats_of(heads, key.shape[1], self.size)
        shared = [x.repeat_interleave(repeats, dim=1) if repeats > 1 else x for x in (key, value)]
        parts = [query, *shared]
        dealt = [x.unflatten(1, (self.size, -1)).permute(1, 0, 3, 2, 4).flatten(3) for x in parts]  # [N, B, s, h D]
        whole = _columns(_AllToAll.apply(torch.cat(dealt, dim=3), self.group))  # [B, S, .]
        pieces = whole.split([x.shape[3] for x in dealt], dim=2)
        return [y.unflatten(2, (-1, x.shape[3])).transpose(1, 2) for x, y in zip(parts, pieces, strict=True)]

    def to_tokens(self, out: Tensor) -> Tensor:
        """What attention made of them, [B, S, H / size, D] -> [B, s, H, D]."""
        dealt = out.unflatten(1, (-1, self.size)).permute(2, 0, 1, 3, 4).contiguous()  # [N, B, s, h, D]
        return _AllToAll.apply(dealt, self.group).permute(1, 2, 0, 3, 4).flatten(2, 3)

    def own_heads(self, values: Tensor) -> Tensor:
        """[H] -> [H / size]"""
        return values.unflatten(0, (self.size, -1))[self.rank]


def _columns(by_rank: Tensor) -> Tensor:
    """[N, B, s, ...] -> [B, s N, ...], in the order of the tokens."""
    return by_rank.movedim(0, 2).flatten(1, 2)


def repeats_of(num_heads: int, num_shared: int, size: int) -> int:
    """How often each of `num_shared` key-value heads is repeated, so that a rank's queries find theirs on it."""
    least = math.lcm(num_shared, size)
    return (least if num_heads % least == 0 else num_heads) // num_shared


class _AllToAll(torch.autograd.Function):
    """`x[r]` goes to rank r; what comes from rank r stands at r."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(grads[0], ctx.group), None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        found = x.new_empty(group.size(), *x.shape)
        dist.all_gather(list(found.unbind()), x.contiguous(), group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(grads[0], ctx.group).sum(0), None


class _Total(torch.autograd.Function):
    """Not `torch.distributed.nn.all_reduce`, which sums gradients too: those of a loss that every rank has alike."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        found = x.clone()
        dist.all_reduce(found, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    found = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(found, x.contiguous(), group=group)
    return found
