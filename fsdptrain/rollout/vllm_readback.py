"""Reads weights back out of vLLM's own layers, by the names of a checkpoint.

vLLM fuses layers (q, k and v in one), and on a CPU it packs a copy of each and drops the original. A packed layer is
read by what it answers to unit vectors: one of them and zeros, so no rounding. With engine tensor parallelism a layer
holds a part of a tensor, which is left out.

Imported in vLLM's own processes too: beside vLLM it needs torch and nothing else.
"""

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fsdptrain.models.checksum import checksum

_UNITS_AT_ONCE = 256  # rows
_WIDTHS = ("embedding_dim", "input_size_per_partition", "input_size")  # the last of what is not split, as a router


def checksums(model: nn.Module, names: Collection[str]) -> dict[str, int]:
    """`models.checksum.checksum` of the tensors called `names`; those that cannot be found are left out."""
    return {name: checksum(tensor) for name, tensor in readable(model, sorted(names))}


@torch.inference_mode()
def readable(model: nn.Module, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """Tensors as the model computes with them: of an embedding with a tied head, what the head has made of it."""
    reader = _Reader(model)
    for name in names:
        tensor = reader.find(name)
        if tensor is not None:
            yield name, tensor


class _Reader:
    """Keeps the last layer that was unpacked: the parts of a fused one stand side by side."""

    def __init__(self, model: nn.Module) -> None:
        source: Any = model
        self._modules = dict(model.named_modules())
        self._mapper = getattr(source, "hf_to_vllm_mapper", None)
        self._fused = {
            part: (whole, index)
            for whole, parts in getattr(source, "packed_modules_mapping", {}).items()
            for index, part in enumerate(parts)
            if len(parts) > 1
        }
        self._last: tuple[str, Tensor | None] = ("", None)

    def find(self, name: str) -> Tensor | None:
        inner = name if self._mapper is None else self._mapper.map_name(name)
        if inner is None:
            return None
        path, _, kind = inner.rpartition(".")
        parent, _, leaf = path.rpartition(".")
        part = name.rpartition(".")[0].rpartition(".")[2]  # some mappers give the name of the fused layer
        fused, index = self._fused.get(part, ("", 0))
        if not fused or leaf not in (part, fused) or (leaf == part and path in self._modules):
            return self._whole(path, kind)
        path = f"{parent}.{fused}" if parent else fused
        whole = self._whole(path, kind)
        sizes = getattr(self._modules.get(path), "output_sizes", None)
        if whole is None or sizes is None or sum(sizes) != len(whole):
            return None
        return whole.split(list(sizes))[index]

    def _whole(self, path: str, kind: str) -> Tensor | None:
        key = f"{path}.{kind}"
        if self._last[0] != key:
            self._last = key, self._read(path, kind)
        return self._last[1]

    def _read(self, path: str, kind: str) -> Tensor | None:
        module: Any = self._modules.get(path)
        tensor = getattr(module, kind, None)
        if not isinstance(tensor, Tensor):
            return None
        head: Any = self._modules.get("lm_head")
        if head is not None and head.weight is tensor and hasattr(head, "cpu_linear"):
            module = head  # its packed copy is what answers: the embedding itself is looked up
        if kind == "weight" and hasattr(module, "cpu_linear") and (tensor.numel() == 0 or module is head):
            tensor = _unpacked(module, tensor)
        size = getattr(module, "org_vocab_size", None)
        return tensor if size is None or kind != "weight" else tensor[:size]


def _unpacked(module: Any, weight: Tensor) -> Tensor:
    """[out, in], in the dtype of `weight`."""
    width = next(getattr(module, key) for key in _WIDTHS if hasattr(module, key))
    units = torch.eye(width, dtype=weight.dtype)
    return torch.cat([module.cpu_linear(rows, weight, None) for rows in units.split(_UNITS_AT_ONCE)]).t()
