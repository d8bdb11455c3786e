"""Gather a sharded tensor on the host of one rank. The other ranks allocate nothing.

`DTensor.full_tensor` gathers on all ranks, and gloo's all-gather holds the result twice. Here each part is received
directly into its place, over gloo for every device, since a file is written from the host.
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
    """Gather `tensor` in `dtype` on the host of rank `owner`; returns None elsewhere.

    All ranks call it in the same order. Each part is cast before it is sent. With several replicas, the replica of
    `owner` sends.
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
            place.copy_(part)  # casts without an extra copy
        else:
            _receive(place, sender)
    return whole


def _senders(owner: int, tensor: DTensor) -> list[int]:
    """Return the ranks that hold the parts for `owner`, in the order of `_places`: one replica of the mesh.

    Returns [] if `owner` is outside the mesh of this rank: the ranks of the owner's mesh, another slice that holds the
    same tensor, send it.
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
    """Yield views of `whole`, one per rank of one replica; None for a rank without a part.

    Later axes split before earlier ones: FSDP shards over the first axes what the others have split.
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
    """Receive into `place`, directly if it is contiguous."""
    if not place.numel():
        return
    buffer = place if place.is_contiguous() else torch.empty(place.shape, dtype=place.dtype)
    dist.recv(buffer, src=sender)
    if buffer is not place:
        place.copy_(buffer)
