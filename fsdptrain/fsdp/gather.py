"""One rank gets the whole of a sharded tensor, in host memory, and no other rank more than it has.

`DTensor.full_tensor` gives it to all ranks, and gloo's all-gather holds the result twice. Here each part goes straight
to its place, over gloo on every device: a file is written from the host anyway.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdptrain.model.loading.materialize import local_part

_HOST = torch.device("cpu")


@torch.no_grad()
def gather_on(owner: int, tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
    """All of `tensor` in `dtype` on the host of rank `owner`, None elsewhere. Every rank calls it, in the same order.

    Each part is cast before it is sent. Of several replicas the one that `owner` belongs to sends.
    """
    rank = dist.get_rank()
    part = local_part(tensor.detach())
    if not isinstance(tensor, DTensor):
        return part.to(_HOST, dtype) if rank == owner else None
    senders = _senders(owner, tensor)
    if rank != owner:
        if rank in senders and part.numel():
            dist.send(part.to(_HOST, dtype).contiguous(), dst=owner)
        return None
    whole = torch.empty(tensor.shape, dtype=dtype)
    for sender, place in zip(senders, _places(whole, tensor), strict=True):
        if place is None:
            continue
        if sender == rank:
            place.copy_(part)  # casts without a copy between
        else:
            _receive(place, sender)
    return whole


def _senders(owner: int, tensor: DTensor) -> list[int]:
    """The ranks that hold what `owner` gets, in the order of `_places`: of each mesh that owner is in, one replica.

    An owner outside of the mesh (another slice of the ranks holds the same) gets it from the slice that it is in.
    """
    ranks = tensor.device_mesh.mesh
    found = (ranks == owner).nonzero()
    if not len(found):
        return []
    for axis, placement in reversed(list(enumerate(tensor.placements))):
        if placement.is_replicate():
            ranks = ranks.select(axis, int(found[0, axis]))
    return ranks.flatten().tolist()


def _places(whole: Tensor, tensor: DTensor) -> Iterator[Tensor | None]:
    """Views of `whole`, one for each rank of one replica; None for a rank that holds nothing.

    A later axis has cut before an earlier one: FSDP shards, over the first axes, what others have split.
    """
    axes: list[tuple[int, Any]] = [(a, x) for a, x in enumerate(tensor.placements) if not x.is_replicate()]
    sizes = [tensor.device_mesh.size(axis) for axis, _ in axes]
    for coordinate in itertools.product(*map(range, sizes)):
        place: Tensor | None = whole
        for (_, placement), size, index in reversed(list(zip(axes, sizes, coordinate, strict=True))):
            if place is not None:
                chunks = place.chunk(size, placement.dim)
                place = chunks[index] if index < len(chunks) else None
        yield place


def _receive(place: Tensor, sender: int) -> None:
    """Into `place`, at once where its numbers lie together."""
    if not place.numel():
        return
    buffer = place if place.is_contiguous() else torch.empty(place.shape, dtype=place.dtype)
    dist.recv(buffer, src=sender)
    if buffer is not place:
        place.copy_(buffer)
