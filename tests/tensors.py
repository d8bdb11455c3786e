"""Compare named tensors, and read them from checkpoints."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from fsdptrain.rollout.weight_sync.checksum import finish_checksums, start_checksum


def load_files(folder: Path | str) -> dict[str, Tensor]:
    """Return all tensors of the safetensors files in `folder`."""
    return {
        name: tensor for file in sorted(Path(folder).glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


def same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    """Whether names and values are equal, bit by bit."""
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def relative(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Return the largest difference over all tensors, relative to the largest element of its tensor, which may be 0."""
    assert found.keys() == wanted.keys()
    largest = {name: tensor.abs().max().clamp(min=1e-30) for name, tensor in wanted.items()}
    return max(((found[n] - wanted[n]).abs().max() / largest[n]).item() for n in wanted)


def checksum(tensor: Tensor) -> int:
    return finish_checksums({"": start_checksum(tensor)})[""]
