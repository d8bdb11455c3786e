"""Count the collectives of a rank: torch's dispatcher shows every one."""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_KINDS = {
    "c10d._allgather_base_": "all-gather",
    "c10d.allgather_": "all-gather",
    "_c10d_functional.all_gather_into_tensor": "all-gather",
    "c10d._reduce_scatter_base_": "reduce-scatter",
    "_c10d_functional.reduce_scatter_tensor": "reduce-scatter",
    "c10d.allreduce_": "all-reduce",
    "_c10d_functional.all_reduce": "all-reduce",
    "c10d.alltoall_base_": "all-to-all",
    "_c10d_functional.all_to_all_single": "all-to-all",
}


class Collectives(TorchDispatchMode):
    """(kind, ranks of the group) -> bytes of the largest tensor of each call: what is gathered, reduced or sent."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self.calls: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func.overloadpacket)
        if name in _KINDS:
            leaves = tree_leaves((args, kwargs, out))
            key = _KINDS[name], _ranks(leaves)
            tensors = [x for x in leaves if isinstance(x, Tensor)]
            if _KINDS[name] == "all-to-all":  # what is sent; the other side may get more or less
                tensors = [args[1] if name.startswith("c10d.") else args[0]]
            self.calls[key] += 1
            if name == "c10d.allgather_":  # into a list of tensors
                self.bytes[key] += sum(x.nbytes for x in tree_leaves(args[0]))
            else:
                self.bytes[key] += max(x.nbytes for x in tensors)
        elif "c10d" in name and not name.endswith(("wait_tensor", "_wrap_tensor_autograd")):
            raise AssertionError(f"a collective that is not counted: {name}")
        return out


def _ranks(leaves: list[Any]) -> tuple[int, ...]:
    for leaf in leaves:
        if isinstance(leaf, torch.ScriptObject):
            try:
                return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(leaf)))
            except RuntimeError:
                continue  # the operator of a reduction
        if isinstance(leaf, str):
            try:
                group = dist.distributed_c10d._resolve_process_group(leaf)
            except (ValueError, RuntimeError, LookupError):
                continue  # the name of a reduction
            return tuple(dist.get_process_group_ranks(group))
    raise AssertionError("a collective without a group")
