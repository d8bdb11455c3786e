"""Split the tokens of a pack over a group of ranks, so that a sequence may exceed the memory of one device.

Rank r of N has columns r, r + N, r + 2N ... of the model's rows, so every rank has an equal share of each prompt and
response. Operations on single tokens (norms, MLPs, routers, the head) run unchanged on 1/N of the tokens. Attention
sees whole sequences and 1/N of the heads, with one all-to-all before and one after (DeepSpeed-Ulysses, arXiv
2309.14509). Boundaries, windows and sinks are therefore unchanged, and the load is balanced for any mask.

`total` sums per-token results so that every rank has those of all tokens. All ranks then compute the same loss,
including sequence-level losses, and each keeps the gradient of its own tokens. FSDP sums the parameter gradients.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsdptrain.errors import NumericsError
from fsdptrain.model.attention.attention import AttentionOptions, Boundaries, packed_attention


@dataclass(frozen=True)
class UlyssesGroup:
    """The ranks that share the tokens of a pack. S: columns of all ranks, s = S / size: columns of one rank."""

    group: dist.ProcessGroup
    rank: int  # within the group
    size: int

    @classmethod
    def of(cls, mesh: DeviceMesh) -> "UlyssesGroup":
        return cls(mesh.get_group(), mesh.get_local_rank(), mesh.size())

    def own_columns(self, rows: Tensor) -> Tensor:
        """Select this rank's columns: [B, S, ...] -> [B, s, ...]"""
        return rows[:, self.rank :: self.size]

    def total(self, values: Tensor) -> Tensor:
        """Sum over ranks. All ranks compute the same loss from the sum, so backward passes the gradient through."""
        return _Total.apply(values, self.group)

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Map [B, H, s, D] of all heads to [B, H / size, S, D] of this rank's heads. One all-to-all for the three.

        Key-value heads are repeated as needed if the group is larger than their number or does not divide it.
        """
        heads = query.shape[1]
        if heads % self.size:
            raise NumericsError(
                f"--context-parallel-size {self.size} must divide the {heads} attention heads of a layer"
            )
        repeats = repeats_of(heads, key.shape[1], self.size)
        shared = [x.repeat_interleave(repeats, dim=1) if repeats > 1 else x for x in (key, value)]
        parts = [query, *shared]
        by_rank = [x.unflatten(1, (self.size, -1)).permute(1, 0, 3, 2, 4).flatten(3) for x in parts]  # [N, B, s, h D]
        ranks_first = _AllToAll.apply(torch.cat(by_rank, dim=3), self.group)  # [N, B, s, .]
        whole = ranks_first.movedim(0, 2).flatten(1, 2)  # [B, S, .], in token order
        pieces = whole.split([x.shape[3] for x in by_rank], dim=2)
        return [y.unflatten(2, (-1, x.shape[3])).transpose(1, 2) for x, y in zip(parts, pieces, strict=True)]

    def to_tokens(self, out: Tensor) -> Tensor:
        """Map the attention output [B, S, H / size, D] to [B, s, H, D]."""
        by_rank = out.unflatten(1, (-1, self.size)).permute(2, 0, 1, 3, 4).contiguous()  # [N, B, s, h, D]
        return _AllToAll.apply(by_rank, self.group).permute(1, 2, 0, 3, 4).flatten(2, 3)


def repeats_of(num_heads: int, num_shared: int, size: int) -> int:
    """Return how often to repeat each of `num_shared` key-value heads so that every rank has those of its queries."""
    least = math.lcm(num_shared, size)
    return (least if num_heads % least == 0 else num_heads) // num_shared


def ulysses_attention(
    group: UlyssesGroup, query: Tensor, key: Tensor, value: Tensor, boundaries: Boundaries, options: AttentionOptions
) -> Tensor:
    """Compute `packed_attention` for columns on several ranks. [B, H, s, D] -> [B, s, H, DV]"""
    query, key, value = group.to_heads(query, key, value)
    if options.sinks is not None:
        options = replace(options, sinks=options.sinks.unflatten(0, (group.size, -1))[group.rank])  # of these heads
    return group.to_tokens(packed_attention(query, key, value, boundaries, options))


class _AllToAll(torch.autograd.Function):
    """Send `x[r]` to rank r. The output holds at r what rank r sent."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(grads[0], ctx.group), None


class _Total(torch.autograd.Function):
    """An all-reduce whose backward is the identity.

    `torch.distributed.nn.all_reduce` also sums the gradients, which is wrong for a loss that every rank computes.
    """

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
