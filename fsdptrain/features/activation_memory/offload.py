"""Offload the activations that a decoder layer saves for its backward pass to host memory.

With full checkpointing that is the input of each layer; without it, all tensors that its operations save. Weights and
tensors shared by all layers (rotary tables, boundaries) are not offloaded: FSDP2 frees and gathers weights itself.

Tensors of a layer are copied out while the next layer computes, and back while the layer after it runs backward. The
device holds the tensors of two layers at a time, and waits only if it is faster than the copies. Autograd owns the
copies: when it frees the saved tensors, both copies are freed.
"""

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from fsdptrain.fsdp.transfers import Transfers
from fsdptrain.model.structure import decoder_layers

SMALLEST = 1024  # [bytes] smaller tensors are not offloaded


def enable_activation_offload(
    model: PreTrainedModel,
    transfers: Transfers,
    *,
    ahead: int = 1,
    host_buffer: Callable[[int], Tensor] | None = None,
) -> None:
    """Wrap the current forwards of the decoder layers. Call it before `shard_model`. Gradients are bitwise unchanged.

    ahead: number of layers whose tensors may be in transit, in addition to the one that computes. host_buffer:
    allocates [bytes] uint8.
    """
    offload = _Offload(transfers, ahead=ahead, host_buffer=host_buffer or transfers.host_buffer)
    for layer in decoder_layers(model):
        layer.forward = partial(offload.run, layer, layer.forward)


_Key = tuple[int, int, torch.dtype]  # storage, its version, and the dtype of the view


class _Kept:
    """A storage that autograd has saved."""

    __slots__ = ("__weakref__", "device", "host", "layer")

    def __init__(self, layer: "_Layer", source: Tensor, host: Tensor) -> None:
        self.layer = layer
        self.device: Tensor | None = source  # [elements]: the original until it is offloaded, later the restored copy
        self.host = host  # [elements]


class _Layer:
    """A layer in one forward pass. It holds only weak references to the saved storages."""

    def __init__(self, before: "_Layer | None") -> None:
        self._before = None if before is None else weakref.ref(before)
        self._kept: list[weakref.ref[_Kept]] = []
        self.copies: dict[_Key, weakref.ref[_Kept]] = {}  # saved during its forward
        self.mark: torch.Event | None = None  # end of its last copy
        self.fetched = False

    def before(self) -> "_Layer | None":
        return None if self._before is None else self._before()

    def add(self, kept: _Kept, key: _Key) -> None:
        self.copies[key] = weakref.ref(kept)
        self._kept.append(self.copies[key])

    def kept(self) -> Iterator[_Kept]:
        yield from (kept for reference in self._kept if (kept := reference()) is not None)


class _Offload:
    def __init__(self, transfers: Transfers, *, ahead: int, host_buffer: Callable[[int], Tensor]) -> None:
        self._transfers = transfers
        self._ahead = ahead
        self._host_buffer = host_buffer
        self._newest: _Layer | None = None

    def run(self, module: nn.Module, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return stock(*args, **kwargs)
        shared = [x for x in tree_leaves(kwargs) if isinstance(x, Tensor)]
        staying = {_identity(x) for x in [*module.parameters(), *module.buffers(), *shared]}  # parameters are gathered
        layer = self._newest = _Layer(before=self._newest)
        with saved_tensors_hooks(partial(self._pack, layer, staying), self._unpack):
            output = stock(*args, **kwargs)
        layer.mark = self._transfers.mark()
        layer.copies = {}
        self._let_go(layer)
        return output

    def _pack(self, layer: _Layer, staying: set[int], tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        elsewhere = tensor.device.type != self._transfers.device.type
        if elsewhere or storage.nbytes() < SMALLEST or _identity(tensor) in staying or tensor.is_conj():
            return tensor
        key = (_identity(tensor), tensor._version, tensor.dtype)
        kept = found() if (found := layer.copies.get(key)) is not None else None
        if kept is None:  # `kept` keeps the storage alive, so its identity stays unique
            source = tensor.detach().as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0)
            kept = _Kept(layer, source, self._host_buffer(source.nbytes).view(source.dtype))
            with self._transfers.queued():
                kept.host.copy_(source, non_blocking=True)
            layer.add(kept, key)
        return kept, tensor.size(), tensor.stride(), tensor.storage_offset()

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        kept, *geometry = packed
        self._fetch(kept.layer)
        self._transfers.wait(kept.layer.mark)
        following = kept.layer
        for _ in range(self._ahead):
            following = following and following.before()
            if following is not None:
                self._fetch(following)
        return kept.device.as_strided(*geometry)

    def _let_go(self, layer: _Layer) -> None:
        """Free the originals of the layer `ahead` layers back, after the computation has waited for its copies."""
        leaving: _Layer | None = layer
        for _ in range(self._ahead):
            leaving = leaving and leaving.before()
        if leaving is not None:
            self._transfers.wait(leaving.mark)
            leaving.fetched = False
            for kept in leaving.kept():
                kept.device = None

    def _fetch(self, layer: _Layer) -> None:
        if layer.fetched:
            return
        layer.fetched = True
        missing = [kept for kept in layer.kept() if kept.device is None]
        for kept in missing:
            kept.device = torch.empty(kept.host.shape, dtype=kept.host.dtype, device=self._transfers.device)
        with self._transfers.queued():
            for kept in missing:
                assert kept.device is not None
                kept.device.copy_(kept.host, non_blocking=True)
        layer.mark = self._transfers.mark()


def _identity(tensor: Tensor) -> int:
    """Return the identity of the storage. Data pointers do not exist for tensors without data."""
    return tensor.untyped_storage()._cdata
