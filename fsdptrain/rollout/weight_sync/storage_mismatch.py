"""Tensors that an engine holds in another dtype or order than they were sent in, told apart from those that are wrong.

vLLM keeps some in float32 (routers), and turns some around at load. Who accepts any difference at the first hand-over
is blind for that tensor ever after.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from fsdptrain.rollout.weight_sync.checksum import checksum
from fsdptrain.types import ChecksumKind

CHECKSUM_KINDS: tuple[ChecksumKind, ...] = ("bits", "values", "multiset")


@dataclass(frozen=True)
class Sent:
    """What is remembered of a tensor."""

    sums: Mapping[ChecksumKind, int]
    num_dims: int

    @classmethod
    def of(cls, tensor: Tensor, kinds: Sequence[ChecksumKind]) -> Self:
        return cls({kind: checksum(tensor, kind) for kind in kinds}, tensor.dim())


def explain(
    wrong: Sequence[str],
    held: Mapping[str, int],
    sent: Mapping[str, Sent],
    read: Callable[[Sequence[str], ChecksumKind], Mapping[str, int]],
) -> dict[str, ChecksumKind]:
    """Those of `wrong` that hold the very numbers that were sent, and what shows it.

    In another order they count as stored otherwise only if all layers do so: one matrix alone was mixed up on its way.
    Vectors are not turned around. `held`: what could be read, `read`: checksums of another kind, of the engine.
    """
    values = read(wrong, "values")
    found: dict[str, ChecksumKind] = {name: "values" for name in wrong if values.get(name) == sent[name].sums["values"]}
    left = [name for name in wrong if name not in found and sent[name].num_dims > 1]
    numbers = read(left, "multiset") if left else {}
    turned = {name for name in left if numbers.get(name) == sent[name].sums["multiset"]}
    layers: dict[str, list[str]] = {}
    for name in held:
        layers.setdefault(_without_numbers(name), []).append(name)
    for alike in layers.values():
        if len(alike) > 1 and turned.issuperset(alike):
            found |= dict.fromkeys(alike, "multiset")
    return found


def _without_numbers(name: str) -> str:
    """The same for a tensor of each layer, and of each expert."""
    return re.sub(r"\.\d+(?=\.)", ".*", name)
