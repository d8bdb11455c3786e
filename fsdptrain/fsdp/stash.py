"""Move the tensors of the trainer to the host while an engine uses the device."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fsdptrain import platform
from fsdptrain.fsdp.optimizer import Optimizer
from fsdptrain.fsdp.optimizer_state import state_tensors
from fsdptrain.fsdp.shards import local_shard
from fsdptrain.model.structure import reshard


class HostStash:
    """Moves device storages to the host and back. Every tensor, view and DTensor on them keeps its identity.

    The storages are resized to zero in place, as FSDP2 does for gathered parameters, so references to them (the
    optimizer, FSDP's buffers) stay valid.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """Copy the storages of `tensors` to the host (pinned if there is an accelerator) and free them.

        On a CPU, storages of memory-mapped files stay: they cannot be resized.
        """
        self._stashed: list[tuple[torch.UntypedStorage, Tensor]] = []
        storages = {storage.data_ptr(): storage for tensor in tensors if (storage := tensor.untyped_storage()).nbytes()}
        for storage in filter(torch.UntypedStorage.resizable, storages.values()):
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=platform.has_accelerator())
            host.copy_(_bytes(storage), non_blocking=True)
            self._stashed.append((storage, host))
        _synchronize()  # the copies must end before their sources are freed
        for storage, _ in self._stashed:
            storage.resize_(0)
        if platform.has_accelerator():
            torch.accelerator.empty_cache()

    def restore(self) -> None:
        """Refill the storages and free the host memory."""
        for storage, host in self._stashed:
            storage.resize_(host.numel())
            _bytes(storage).copy_(host, non_blocking=True)
        _synchronize()  # the copies must end before the host memory is freed


def stash_trainer(model: nn.Module, optimizer: Optimizer, stashes: dict[str, HostStash], *, keep_weights: bool) -> None:
    """Move the state of `optimizer` and, unless `keep_weights`, the weights to the host: entries of `stashes`."""
    device = platform.local_device().type

    def on_device(tensors: Iterable[Tensor]) -> list[Tensor]:
        return [local_shard(tensor) for tensor in tensors if tensor.device.type == device]

    optimizer.zero_grad()
    if "optimizer" not in stashes:
        stashes["optimizer"] = HostStash(on_device(state_tensors(optimizer).values()))
    if not keep_weights and "weights" not in stashes:
        reshard(model)
        stashes["weights"] = HostStash(on_device(model.parameters()))


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _synchronize() -> None:
    if platform.has_accelerator():
        torch.accelerator.synchronize()
