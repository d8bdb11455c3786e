"""The reference model: a sharded copy of weights on the host, swapped into the policy to compute its logprobs.

It costs one shard of host memory per rank and no second model on the device or in FSDP. Swaps are bitwise exact in both
directions. A rollout takes one swap in and one out.

With --ref-dtype bfloat16 the host holds the parameters rounded to bfloat16, in half the memory, and the model computes
with these values. There is no room on the host for the policy then: it waits on the device, in the place of its
gradients, which do not exist while logprobs are computed.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.errors import CheckpointError
from fsdptrain.feature import Features
from fsdptrain.fsdp.build import load_model
from fsdptrain.fsdp.mesh import Meshes
from fsdptrain.fsdp.shards import describe, fingerprint, local_shard, model_tensors, with_shard
from fsdptrain.model.loading.files import named_in_errors, resolve_checkpoint
from fsdptrain.model.structure import reshard


class ReferenceBank:
    """A host copy of the current weights of `source`. Each rank stores its own shards.

    dtype: of wider parameters on the host. None: that of each parameter.
    """

    def __init__(self, source: nn.Module, *, dtype: torch.dtype | None = None) -> None:
        reshard(source)
        self.fingerprint = fingerprint(source)
        live, num_parameters = _live_tensors(source), len(list(source.parameters()))
        self._bank = [_host_copy(tensor, dtype) for tensor in live[:num_parameters]]
        self._bank += [_host_copy(tensor, None) for tensor in live[num_parameters:]]
        self._policy: list[Tensor] | None = None  # of parameters with another dtype on the host, within `swapped_into`

    @torch.no_grad()
    def copy_from(self, model: nn.Module) -> None:
        """Copy the current weights of `model`, which is sharded like the source."""
        reshard(model)
        for live, banked in zip(_live_tensors(model), self._bank, strict=True):
            banked.copy_(live.to(banked.dtype), non_blocking=True)
        if platform.has_accelerator():
            torch.accelerator.synchronize()  # `model` may change from here on

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """Return what a checkpoint of the reference holds, sharded like `model`. Outside of `swapped_into`."""
        reshard(model)  # a gathered parameter is a plain tensor, which does not tell how its shards lie
        names = [name for name, _ in [*model.named_parameters(), *model.named_buffers()]]
        banked = dict(zip(names, self._bank, strict=True))
        return {name: with_shard(tensor, banked[name]) for name, tensor in model_tensors(model).items()}

    @contextmanager
    def swapped_into(self, model: nn.Module) -> Iterator[None]:
        """Swap the reference weights into `model`, sharded like the source, and restore the policy on exit or error."""
        self._swap(model)
        try:
            yield
        finally:
            self._swap(model)

    @torch.no_grad()
    def _swap(self, model: nn.Module) -> None:
        """Exchange model and bank tensor by tensor. Copies of the policy are allocated before any change."""
        reshard(model)
        both = list(zip(_live_tensors(model), self._bank, strict=True))
        pairs = [(live, banked) for live, banked in both if live.dtype == banked.dtype]
        rounded = [(live, banked) for live, banked in both if live.dtype != banked.dtype]
        scratch: dict[torch.device, Tensor] = {}
        for device in {live.device for live, _ in pairs}:
            size = max(live.nbytes for live, _ in pairs if live.device == device)
            scratch[device] = torch.empty(size, dtype=torch.uint8, device=device)
        waiting, self._policy = self._policy, [live.clone() for live, _ in rounded] if self._policy is None else None
        for live, banked in pairs:
            policy = scratch[live.device][: live.nbytes].view(live.dtype).view(live.shape)
            policy.copy_(live)
            live.copy_(banked, non_blocking=True)
            banked.copy_(policy, non_blocking=True)
        for number, (live, banked) in enumerate(rounded):
            if waiting is None:
                live.copy_(banked.to(live.device, non_blocking=True))  # converted on the device
            else:
                banked.copy_(live.to(banked.dtype), non_blocking=True)  # a checkpoint may have been loaded
                live.copy_(waiting[number], non_blocking=True)
        if platform.has_accelerator():
            torch.accelerator.synchronize()  # the host may read and free the copied memory from here on


def load_bank(config: Config, features: Features, meshes: Meshes) -> ReferenceBank:
    """Load the weights of --ref-load. The sharded model is freed before this returns. Collective."""
    assert config.ref.load is not None
    cutting = Features([feature for feature in features if feature.cuts_parameters])
    with named_in_errors("--ref-load"):
        path = resolve_checkpoint(config.ref.load)
        loaded = load_model(config, path, meshes, features=cutting)
        bank = ReferenceBank(loaded, dtype=_host_dtype(config))
    del loaded
    gc.collect()  # modules and FSDP hooks form reference cycles
    return bank


def choose_bank(
    model: nn.Module, config: Config, features: Features, loaded: ReferenceBank | None
) -> ReferenceBank | None:
    """Return `loaded`, or the weights of `model` if the reference has weights of its own.

    Raises CheckpointError if `loaded` has other shapes than `model`.
    """
    if loaded is None:
        return ReferenceBank(model, dtype=_host_dtype(config)) if config.stores_reference else None
    with features.without():
        own = fingerprint(model)
    if loaded.fingerprint != own:
        raise CheckpointError(
            f"--ref-load {config.ref.load} is {describe(loaded.fingerprint)}, but --hf-checkpoint is "
            f"{describe(own)}: the reference must have the same shapes"
        )
    return loaded


def _host_dtype(config: Config) -> torch.dtype | None:
    return torch.bfloat16 if config.ref.dtype == "bfloat16" else None


def _live_tensors(model: nn.Module) -> list[Tensor]:
    """Return this rank's shards and buffers. A tied weight appears once."""
    return [local_shard(tensor) for tensor in [*model.parameters(), *model.buffers()]]


def _host_copy(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    narrower = dtype is not None and tensor.is_floating_point() and dtype.itemsize < tensor.dtype.itemsize
    host = torch.empty(tensor.shape, dtype=dtype if narrower else tensor.dtype, pin_memory=platform.has_accelerator())
    return host.copy_(tensor)
