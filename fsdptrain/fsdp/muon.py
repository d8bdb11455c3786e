"""Muon on sharded matrices: momentum, then the orthogonalization of the whole matrix (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv 2502.16982).

    B <- m B + (1 - m) G,   U = (1 - m) G + m B,   W <- (1 - lr wd) W - lr s O,   O = orthogonalized U

with m = 0.95 and s = 0.2 sqrt(max(out, in)), the size of AdamW's updates (Liu et al.), so that its learning
rates fit. Numbers are those of torch.optim.Muon.
Momentum and weight decay are local to a shard. For O, the ranks of a shard group take one matrix each: an all-to-all
brings all shards of U to it in bfloat16, and another one returns the shards of O. At its peak a rank holds about six
copies in bfloat16 of its largest matrix, or of its experts of a stack [E, ., .], which are orthogonalized together; the
plan does not count them. Experts that are sharded by experts need no communication. All other parameters are updated
by AdamW.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from fsdptrain import platform
from fsdptrain.config import OptimConfig
from fsdptrain.errors import ConfigError
from fsdptrain.fsdp.optimizers import Groups, adamw, zeros_of
from fsdptrain.fsdp.shards import local_shard

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the Newton-Schulz iteration: Jordan et al.; also those of torch
ITERATIONS = 5
MOMENTUM = 0.95  # Nesterov
_EPS = 1e-7


def muon(groups: Groups, options: OptimConfig) -> Optimizer:
    """Create the optimizer: Muon for the groups of kind `matrix`, AdamW for the others."""
    others = [group for group in groups if group["kind"] != "matrix"]
    scale = 1.0 if options.muon_lr is None else options.muon_lr / options.lr
    matrices = [group | {"lr": options.lr} for group in groups if group["kind"] == "matrix"]
    for group in matrices:
        group["lr_scale"] *= scale
    if not matrices:
        raise ConfigError("--optimizer muon: no matrix is trained: use --optimizer adamw")
    return Muon(matrices, adamw(others, options) if others else None, options)


class Muon(Optimizer):
    """Muon for `matrices`, and the steps of `adam` for the parameters of its own groups."""

    def __init__(self, matrices: Groups, adam: torch.optim.AdamW | None, options: OptimConfig) -> None:
        super().__init__(matrices, {})
        self._matrices = list(self.param_groups)
        self._adam = adam
        if adam is not None:
            self.param_groups += adam.param_groups
            self.state = adam.state
        for group in self._matrices:
            for p in group["params"]:
                _gathered_axis(p)  # raises ConfigError
                self.state[p] = {"momentum_buffer": zeros_of(p)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update all parameters that have gradients, the same ones on every rank. Collective."""
        assert closure is None
        for group in self._matrices:
            params = [p for p in group["params"] if p.grad is not None]
            for p, direction in _orthogonalized(params, self._update):
                local, scale = local_shard(p), 0.2 * math.sqrt(max(p.shape[-2:]))
                local.mul_(1 - group["lr"] * group["weight_decay"])
                local.add_(direction.to(local.device), alpha=-group["lr"] * scale)
        if self._adam is not None:
            self._adam.step()

    def _update(self, p: nn.Parameter) -> Tensor:
        """Update the momentum of this rank's shard and return U (Nesterov), bfloat16 on the device."""
        assert p.grad is not None
        gradient, buffer = local_shard(p.grad), local_shard(self.state[p]["momentum_buffer"])
        buffer.lerp_(gradient, 1 - MOMENTUM)
        return gradient.lerp(buffer, MOMENTUM).to(platform.local_device(), torch.bfloat16)


def orthogonalize(update: Tensor) -> Tensor:
    """Return the matrices [..., m, n] with singular values near 1: five Newton-Schulz iterations in bfloat16."""
    a, b, c = COEFFICIENTS
    x, is_tall = update.bfloat16(), update.shape[-2] > update.shape[-1]
    x = x.mT if is_tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    add = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = add(x, add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


@dataclass(frozen=True)
class _Gathering:
    """How the shards of one parameter form whole matrices: along `dim`, over the ranks of `group`."""

    group: dist.ProcessGroup
    dim: int
    sizes: tuple[torch.Size, ...]  # of the shards, by rank of the group


def _orthogonalized(params: Sequence[nn.Parameter], update: Any) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield (parameter, this rank's part of O). Collective; the order is the same on every rank."""
    by_mesh: dict[tuple[DeviceMesh, int], list[nn.Parameter]] = {}
    for p in params:
        axis = _gathered_axis(p)
        if axis is None:
            if local_shard(p).numel():
                yield p, orthogonalize(update(p))
        else:
            by_mesh.setdefault(axis, []).append(p)
    for (mesh, axis), members in by_mesh.items():
        group = mesh.get_group(axis)
        members = sorted(members, key=lambda p: -p.numel())  # matrices that are computed at one time are of one size
        for first in range(0, len(members), group.size()):
            batch = members[first : first + group.size()]
            plans = [_plan(p, mesh, axis) for p in batch]
            yield from zip(batch, _exchange_and_orthogonalize([update(p) for p in batch], plans), strict=True)


def _gathered_axis(p: Tensor) -> tuple[DeviceMesh, int] | None:
    """Return the mesh and its axis over which the matrices of `p` are divided; None if each is whole on its rank."""
    if not isinstance(p, DTensor):
        return None
    mesh = p.device_mesh
    cut = [
        axis
        for axis, placement in enumerate(p.placements)  # _StridedShard is no Shard
        if not placement.is_replicate() and cast(Shard, placement).dim >= p.ndim - 2 and mesh.size(axis) > 1
    ]
    if len(cut) > 1:
        raise ConfigError("--optimizer muon: matrices are divided along two axes: use --optimizer adamw")
    return (mesh, cut[0]) if cut else None


def _plan(p: Tensor, mesh: DeviceMesh, axis: int) -> _Gathering:
    assert isinstance(p, DTensor)
    group, placement = mesh.get_group(axis), p.placements[axis]
    assert isinstance(placement, Shard)
    local, dim, total = local_shard(p).shape, placement.dim, p.shape[placement.dim]
    chunk = math.ceil(total / group.size())
    lengths = [max(0, min(chunk, total - rank * chunk)) for rank in range(group.size())]
    sizes = tuple(torch.Size((*local[:dim], length, *local[dim + 1 :])) for length in lengths)
    return _Gathering(group, dim, sizes)


def _exchange_and_orthogonalize(updates: Sequence[Tensor], plans: Sequence[_Gathering]) -> list[Tensor]:
    """Return the shards of O of up to one matrix (or stack) per rank of the group. Rank i computes that of plans[i]."""
    group = plans[0].group
    rank, size = group.rank(), group.size()
    shard_sizes = [update.numel() for update in updates] + [0] * (size - len(updates))
    own = plans[rank] if rank < len(plans) else None
    own_sizes = [shape.numel() for shape in own.sizes] if own is not None else [0] * size
    device = updates[0].device
    received = torch.empty(sum(own_sizes), dtype=torch.bfloat16, device=device)
    sent = torch.cat([update.reshape(-1) for update in updates])
    dist.all_to_all_single(received, sent, own_sizes, shard_sizes, group=group)
    if own is not None:
        shards = [x.view(shape) for x, shape in zip(received.split(own_sizes), own.sizes, strict=True)]
        whole = orthogonalize(torch.cat(shards, dim=own.dim))
        pieces = whole.split([shape[own.dim] for shape in own.sizes], dim=own.dim)
        received = torch.cat([piece.reshape(-1) for piece in pieces])
    returned = torch.empty_like(sent)
    dist.all_to_all_single(returned, received, shard_sizes, own_sizes, group=group)
    parts = returned.split(shard_sizes[: len(updates)])
    return [part.view(update.shape) for part, update in zip(parts, updates, strict=True)]
