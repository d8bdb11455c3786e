"""The reference model: a sharded copy of weights on the host, swapped into the policy to compute its logprobs.

It costs one shard of host memory per rank and no second model on the device or in FSDP. Swaps are bitwise exact in both
directions. A rollout takes one swap in and one out.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from fsdptrain import platform
from fsdptrain.enabled_features import NO_FEATURES, Features
from fsdptrain.fsdp.shards import local_shard
from fsdptrain.model.structure import reshard


class ReferenceBank:
    """A host copy of the current weights of `source`. Each rank stores its own shards."""

    def __init__(self, source: nn.Module, *, only_trained: bool = False) -> None:
        """only_trained: other weights of the reference are those of the policy. Then adapters stay in the model."""
        self._only_trained = only_trained
        reshard(source)
        pinned = platform.has_accelerator()
        live = self._live_tensors(source)
        self._bank = [torch.empty(x.shape, dtype=x.dtype, pin_memory=pinned).copy_(x) for x in live]

    @property
    def gib(self) -> float:
        return sum(tensor.nbytes for tensor in self._bank) / platform.GIB

    @contextmanager
    def swapped_into(self, model: nn.Module, features: Features = NO_FEATURES) -> Iterator[None]:
        """Swap the reference weights into `model`, sharded like the source, and restore the policy on exit or error."""
        with nullcontext() if self._only_trained else features.without():
            self._swap(model)
            try:
                yield
            finally:
                self._swap(model)

    @torch.no_grad()
    def _swap(self, model: nn.Module) -> None:
        """Exchange model and bank tensor by tensor. Memory is allocated before any change."""
        reshard(model)
        pairs = list(zip(self._live_tensors(model), self._bank, strict=True))
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
            torch.accelerator.synchronize()  # the host may read and free the copied memory from here on

    def _live_tensors(self, model: nn.Module) -> list[Tensor]:
        """Return this rank's shards and buffers. A tied weight appears once."""
        tensors = [*model.parameters(), *model.buffers()]
        return [local_shard(tensor) for tensor in tensors if tensor.requires_grad or not self._only_trained]


def reference_line(bank: ReferenceBank | None) -> str:
    """Return the line of the log that says where the reference is and what it costs. None: it is under an adapter."""
    where = f"on the host, {bank.gib:.2f} GiB per rank" if bank else "the model without its adapter, no memory"
    return f"reference model: {where}, one more forward pass per rollout; --kl-loss-coef 0 leaves it out"
