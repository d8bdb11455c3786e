"""At the first hand-over only what holds the very numbers that were sent passes for stored otherwise."""

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from fsdptrain.rollout.weight_sync.checksum import checksum
from fsdptrain.rollout.weight_sync.storage_mismatch import CHECKSUM_KINDS, Sent, explain
from fsdptrain.types import ChecksumKind

MATRICES = [f"layers.{i}.experts.{k}.up.weight" for i in range(2) for k in range(2)]


def sent() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    names = [*MATRICES, "layers.0.norm.weight", "layers.1.norm.weight", "head.weight"]
    return {name: torch.randn((8,) if "norm" in name else (8, 8), generator=generator).bfloat16() for name in names}


def explained(held: Mapping[str, Tensor]) -> dict[str, ChecksumKind]:
    def read(names: Sequence[str], kind: ChecksumKind) -> dict[str, int]:
        return {name: checksum(held[name], kind) for name in names}

    known = {name: Sent.of(tensor, CHECKSUM_KINDS) for name, tensor in sent().items()}
    sums = read(list(held), "bits")
    wrong = [name for name in held if sums[name] != known[name].sums["bits"]]
    return explain(wrong, sums, known, read)


@pytest.mark.parametrize(
    "turn", [lambda t: t.t(), lambda t: t.flip(0), lambda t: torch.nn.functional.pad(t, (0, 2)).t()]
)
def test_matrices_of_all_layers_may_be_turned_around(turn):
    held = {name: turn(tensor) if name in MATRICES else tensor for name, tensor in sent().items()}
    assert explained(held) == dict.fromkeys(MATRICES, "multiset")


@pytest.mark.parametrize("name", sent())
def test_one_alone_may_not(name):
    assert explained(sent() | {name: sent()[name].flip(0)}) == {}


@pytest.mark.parametrize("name", sent())
def test_any_may_be_held_in_another_dtype_that_has_room_for_it(name):
    tensor = sent()[name].float()
    assert explained(sent() | {name: tensor}) == {name: "values"}
    tensor.view(-1)[3] *= 1.001
    assert explained(sent() | {name: tensor}) == {}


def test_turned_around_with_one_other_number_it_does_not_pass():
    held = {name: tensor.t().contiguous() if name in MATRICES else tensor for name, tensor in sent().items()}
    held[MATRICES[2]][1, 2] *= 1.01
    assert explained(held) == {}
