"""Bytes that tensors hold on a CPU, which has no allocator to ask: by the storages that live.

torch's profiler has events of allocations, but none of what a thread of gloo frees as the last that holds it: on a busy
machine these add up. A storage that is freed there is counted off when it is, by whichever thread. MemTracker of torch
counts so too, but takes no second forward pass of a model.
"""

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Storages(TorchDispatchMode):
    """`peak`: most bytes above what was there at the start. What kernels and gloo make for themselves is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._live = 0
        self._counting = False
        self._sizes: dict[int, int] = {}  # by the identity of a storage
        self._alive: dict[int, weakref.ref[UntypedStorage]] = {}
        self._dead: deque[int] = deque()  # not counted off at once: a thread may be in the middle of counting
        self._resize: Callable[..., Any] = UntypedStorage.resize_

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def watch_inductor(self) -> None:
        """Count the buffers of code that inductor compiles from now on, which makes them past the dispatcher."""
        stock = torch._C._dynamo.guards._empty_strided_cpu

        def empty(*args: Any) -> Tensor:
            tensor = stock(*args)
            if self._counting:
                self._meet(tensor, new=True)
                self._look()
            return tensor

        torch._C._dynamo.guards._empty_strided_cpu = empty

    def __enter__(self) -> "Storages":
        def resize(storage: UntypedStorage, size: int) -> Any:  # how FSDP2 frees what it has gathered
            self._know(storage, new=False)
            result = self._resize(storage, size)
            self._live += size - self._sizes[id(storage)]
            self._sizes[id(storage)] = size
            self._look()
            return result

        UntypedStorage.resize_ = resize  # type: ignore[method-assign]
        self._counting = True
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._counting = False
        UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor | AsyncCollectiveTensor) for t in types):  # comes again as what it is made of
            return NotImplemented
        for tensor in tree_leaves((args, kwargs)):
            self._meet(tensor, new=False)
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            self._meet(tensor, new=True)
        self._look()
        return out

    def _meet(self, tensor: Any, *, new: bool) -> None:
        if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
            self._know(tensor.untyped_storage(), new=new)

    def _know(self, storage: UntypedStorage, *, new: bool) -> None:
        """`new`: made inside. What is given to an operation without having been made by one was there before."""
        self._bury()  # before the look: what is new may have the identity of what is dead
        key = id(storage)
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, lambda _: self._dead.append(key))
            self._sizes[key] = storage.nbytes()
            self._live += storage.nbytes() if new else 0

    def _bury(self) -> None:
        while self._dead:
            key = self._dead.popleft()
            del self._alive[key]
            self._live -= self._sizes.pop(key)

    def _look(self) -> None:
        self._bury()
        self.peak = max(self.peak, self._live)


class LargestTensor(TorchDispatchMode):
    """`numel`: of the largest tensor that an operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [tensor.numel() for tensor in tree_leaves(out) if isinstance(tensor, Tensor)]
        self.numel = max([self.numel, *sizes])
        return out


def bytes_saved(model: nn.Module, forward: Callable[[], Any]) -> int:
    """Bytes that autograd keeps of what `forward` computes, without the parameters of `model`."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    return sum(storage.nbytes() for storage in saved.values())
