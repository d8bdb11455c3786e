"""Write the safetensors files of a checkpoint from several ranks, tensor by tensor, after a plan from shapes alone.

A file is a header with the position of every tensor, followed by their bytes without gaps
(github.com/huggingface/safetensors). The plan determines all positions, so a rank holds only the tensor that it writes,
and the index needs no communication.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

INDEX = "model.safetensors.index.json"
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class HubFile:
    """One file of the export and the rank that writes it."""

    name: str
    writer: int
    tensors: Mapping[str, Tensor]  # on meta: shapes and dtypes

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Offset of each tensor in the data. Wide dtypes come first, so that every element is aligned to its size."""
        offsets, end = {}, 0
        for name, tensor in sorted(self.tensors.items(), key=lambda item: -item[1].element_size()):
            offsets[name] = end
            end += tensor.nbytes
        return offsets

    @cached_property
    def header(self) -> bytes:
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        for name, begin in self.offsets.items():
            tensor = self.tensors[name]
            place = [begin, begin + tensor.nbytes]
            entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # align the data to 8 bytes
        return len(text).to_bytes(8, "little") + text


def share_out(units: Sequence[Mapping[str, Tensor]], num_writers: int) -> list[int]:
    """Return the writer of each unit: contiguous runs of about equal bytes."""
    sizes = [sum(tensor.nbytes for tensor in unit.values()) for unit in units]
    total = 1 + sum(sizes)  # +1 assigns empty units at the end to the last writer too
    return [sum(sizes[:i]) * num_writers // total for i in range(len(sizes))]


def plan_files(units: Sequence[Mapping[str, Tensor]], writers: Sequence[int], *, max_bytes: int) -> list[HubFile]:
    """Plan files of one writer and at most `max_bytes` each. A larger tensor gets a separate file."""
    groups: list[tuple[int, dict[str, Tensor]]] = []
    for writer, own in groupby(zip(writers, units, strict=True), key=lambda pair: pair[0]):
        part: dict[str, Tensor] = {}
        for name, tensor in (item for _, unit in own for item in unit.items()):
            if part and sum(t.nbytes for t in part.values()) + tensor.nbytes > max_bytes:
                groups.append((writer, part))
                part = {}
            part[name] = tensor
        groups.append((writer, part))
    if len(groups) == 1:
        return [HubFile("model.safetensors", *groups[0])]
    names = [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
    return [HubFile(name, *group) for name, group in zip(names, groups, strict=True)]


def write_index(folder: Path, files: Sequence[HubFile]) -> None:
    """Write the index in the format of transformers. A single file has no index."""
    if len(files) == 1:
        return
    weight_map = {name: file.name for file in files for name in file.tensors}
    index = {"metadata": {"total_size": sum(file.num_bytes for file in files)}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index | {"weight_map": dict(sorted(weight_map.items()))}, indent=2))


class HubWriter:
    """Writes the files of one rank into `folder`. Raises OSError."""

    def __init__(self, folder: Path, files: Sequence[HubFile]) -> None:
        self._folder = folder
        self._files = files
        self._file_of = {name: file for file in files for name in file.tensors}
        self._left = set(self._file_of)
        for file in files:
            (folder / file.name).write_bytes(file.header)

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            file = self._file_of[name]
            assert (tensor.shape, tensor.dtype) == (file.tensors[name].shape, file.tensors[name].dtype), name
            with (self._folder / file.name).open("r+b") as stream:
                stream.seek(len(file.header) + file.offsets[name])
                stream.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            self._left.remove(name)

    def finish(self) -> None:
        """Check that every tensor was written and that each file has the size given by its header."""
        assert not self._left, self._left
        for file in self._files:
            with safe_open(self._folder / file.name, framework="pt"):
                pass
