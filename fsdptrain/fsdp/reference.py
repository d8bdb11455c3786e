"""The reference model: a sharded copy of weights on the host, put in the policy's place while it is scored.

One shard of host memory for each rank, and no second model: not on the device, not in FSDP. Bitwise exact both ways.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fsdptrain import platform
from fsdptrain.fsdp.shards import fingerprint, local_shard
from fsdptrain.model.structure import reshard


class ReferenceBank:
    """A copy of the weights that `source` has now, each rank its own shards: one shard of host memory."""

    def __init__(self, source: nn.Module) -> None:
        reshard(source)
        self.fingerprint = fingerprint(source)
        self._bank = [_host_copy(tensor) for tensor in _live_tensors(source)]

    @torch.no_grad()
    def copy_from(self, model: nn.Module) -> None:
        """The bank becomes what `model`, sharded like the source, is now."""
        reshard(model)
        for live, banked in zip(_live_tensors(model), self._bank, strict=True):
            banked.copy_(live, non_blocking=True)
        if platform.has_accelerator():
            torch.accelerator.synchronize()  # `model` may change from here on

    @contextmanager
    def swapped_into(self, model: nn.Module) -> Iterator[None]:
        """Inside, `model`, sharded like the source, is the reference; afterwards, and on errors, the policy again."""
        self._swap(model)
        try:
            yield
        finally:
            self._swap(model)

    @torch.no_grad()
    def _swap(self, model: nn.Module) -> None:
        """Exchange model and bank, tensor by tensor, through one buffer that is there before anything is changed."""
        reshard(model)
        pairs = list(zip(_live_tensors(model), self._bank, strict=True))
        scratch: dict[torch.device, Tensor] = {}
        for device in {live.device for live, _ in pairs}:
            size = max(live.nbytes for live, _ in pairs if live.device == device)
            scratch[device] = torch.empty(size, dtype=torch.uint8, device=device)
        for live, banked in pairs:
            policy = scratch[live.device][: live.nbytes].view(live.dtype).view(live.shape)
            policy.copy_(live)
            live.copy_(banked, non_blocking=True)
            banked.copy_(policy, non_blocking=True)
        if platform.has_accelerator():
            torch.accelerator.synchronize()  # from here on the host may read and free what was copied


def _live_tensors(model: nn.Module) -> list[Tensor]:
    """This rank's shards, and buffers; a tied weight is there once, and is exchanged once."""
    return [local_shard(tensor) for tensor in [*model.parameters(), *model.buffers()]]


def _host_copy(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=platform.has_accelerator())
    return host.copy_(tensor)
