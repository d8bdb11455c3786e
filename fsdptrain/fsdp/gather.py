"""One rank gets the whole of a sharded tensor, in host memory, and no other rank more than it has.

`DTensor.full_tensor` gives it to all ranks, and gloo's all-gather holds the result twice. Here each part goes straight
to its place, over gloo on every device: a file is written from the host anyway.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from fsdptrain.models.materialize import local_part

_HOST = torch.device("cpu")


@torch.no_grad()
def gather_on(owner: int, tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
    """All of `tensor` in `dtype` on the host of rank `owner`, None elsewhere. Every rank calls it, in the same order.

    Each part is cast before it is sent. Of several replicas the one that `owner` belongs to sends.
    """
    rank = dist.get_rank()
    part = local_part(tensor.detach())
    axis = _sharded_axis(tensor)
    if axis is None or not isinstance(tensor, DTensor):
        return part.to(_HOST, dtype) if rank == owner else None
    group = dist.get_process_group_ranks(tensor.device_mesh.get_group(axis))
    if owner not in group:
        return None
    if rank != owner:
        if part.numel():
            dist.send(part.to(_HOST, dtype).contiguous(), dst=owner)
        return None
    placement = tensor.placements[axis]
    assert isinstance(placement, Shard)
    whole = torch.empty(tensor.shape, dtype=dtype)
    for sender, place in zip(group, whole.chunk(len(group), placement.dim), strict=False):  # as Shard cuts it
        if sender == rank:
            place.copy_(part)  # casts without a copy between
        else:
            _receive(place, sender)
    return whole


def _sharded_axis(tensor: Tensor) -> int | None:
    """Of its mesh: there is at most one."""
    if not isinstance(tensor, DTensor):
        return None
    axes = [axis for axis, placement in enumerate(tensor.placements) if isinstance(placement, Shard)]
    assert len(axes) <= 1
    return axes[0] if axes else None


def _receive(place: Tensor, sender: int) -> None:
    """Into `place`, at once where its numbers lie together."""
    if not place.numel():
        return
    buffer = place if place.is_contiguous() else torch.empty(place.shape, dtype=place.dtype)
    dist.recv(buffer, src=sender)
    if buffer is not place:
        place.copy_(buffer)
