"""Tell tensors that an engine stores in another dtype or layout from tensors that hold wrong values.

vLLM keeps some tensors in float32 (routers) and transposes others at load. Accepting any difference at the first weight
sync would leave these tensors unverified for the rest of the run.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from fsdptrain.rollout.weight_sync.checksum import StartedChecksum, finish_checksums, start_checksum
from fsdptrain.types import ChecksumKind

CHECKSUM_KINDS: tuple[ChecksumKind, ...] = ("bits", "values", "multiset")


@dataclass(frozen=True)
class SentTensor:
    """What the trainer remembers of a tensor that it sent."""

    checksums: Mapping[ChecksumKind, int]
    num_dims: int


class SentTensors:
    """Collects them without waiting for the device."""

    def __init__(self) -> None:
        self._started: dict[str, tuple[Sequence[ChecksumKind], int]] = {}
        self._checksums: dict[tuple[str, ChecksumKind], StartedChecksum] = {}

    def add(self, name: str, tensor: Tensor, kinds: Sequence[ChecksumKind]) -> None:
        self._started[name] = kinds, tensor.dim()
        self._checksums |= {(name, kind): start_checksum(tensor, kind) for kind in kinds}

    def finish(self) -> dict[str, SentTensor]:
        """Wait once, and return the tensors in the order of `add`."""
        sums = finish_checksums(self._checksums)
        return {
            name: SentTensor({kind: sums[name, kind] for kind in kinds}, num_dims)
            for name, (kinds, num_dims) in self._started.items()
        }


def classify(
    wrong: Sequence[str],
    readable: Sequence[str],
    sent: Mapping[str, SentTensor],
    read: Callable[[Sequence[str], ChecksumKind], Mapping[str, int]],
) -> dict[str, ChecksumKind]:
    """For each tensor of `wrong` that holds the values that were sent, the kind of checksum that proves it.

    "values": another dtype. "multiset": another layout, accepted only if the engine stores the same tensor of every
    layer so; a single one was scrambled in transit. Vectors have no other layout.

    readable: all tensors whose checksums the engine can compute. read: computes checksums of another kind.
    """
    values = read(wrong, "values")
    same_values = [name for name in wrong if values.get(name) == sent[name].checksums["values"]]
    left = [name for name in wrong if name not in same_values and sent[name].num_dims > 1]
    multisets = read(left, "multiset") if left else {}
    permuted = {name for name in left if multisets.get(name) == sent[name].checksums["multiset"]}
    by_layer: dict[str, list[str]] = {}
    for name in readable:
        by_layer.setdefault(_without_numbers(name), []).append(name)
    in_every_layer = [
        name for names in by_layer.values() if len(names) > 1 and permuted.issuperset(names) for name in names
    ]
    return {**dict.fromkeys(same_values, "values"), **dict.fromkeys(in_every_layer, "multiset")}


def _without_numbers(name: str) -> str:
    """The same string for the tensors of all layers and all experts."""
    return re.sub(r"\.\d+(?=\.)", ".*", name)
