"""Only tensors with exactly the pushed values count as stored in another dtype or layout."""

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from fsdptrain.rollout.weight_sync.storage_mismatch import CHECKSUM_KINDS, SentTensors, classify
from fsdptrain.types import ChecksumKind
from tests.tensors import checksum

MATRICES = [f"layers.{i}.experts.{k}.up.weight" for i in range(2) for k in range(2)]


def sent() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    names = [*MATRICES, "layers.0.norm.weight", "layers.1.norm.weight", "head.weight"]
    return {name: torch.randn((8,) if "norm" in name else (8, 8), generator=generator).bfloat16() for name in names}


def classified(held: Mapping[str, Tensor]) -> dict[str, ChecksumKind]:
    def read(names: Sequence[str], kind: ChecksumKind) -> dict[str, int]:
        return {name: checksum(held[name], kind) for name in names}

    recorded = SentTensors()
    for name, tensor in sent().items():
        recorded.add(name, tensor, CHECKSUM_KINDS)
    known = recorded.finish()
    sums = read(list(held), "bits")
    wrong = [name for name in held if sums[name] != known[name].checksums["bits"]]
    return classify(wrong, list(sums), known, read)


@pytest.mark.parametrize(
    "permute", [lambda t: t.t(), lambda t: t.flip(0), lambda t: torch.nn.functional.pad(t, (0, 2)).t()]
)
def test_the_same_matrix_of_every_layer_may_have_another_layout(permute):
    held = {name: permute(tensor) if name in MATRICES else tensor for name, tensor in sent().items()}
    assert classified(held) == dict.fromkeys(MATRICES, "multiset")


@pytest.mark.parametrize("name", sent())
def test_a_single_matrix_may_not_have_another_layout(name):
    assert classified(sent() | {name: sent()[name].flip(0)}) == {}


@pytest.mark.parametrize("name", sent())
def test_any_tensor_may_have_a_wider_dtype(name):
    tensor = sent()[name].float()
    assert classified(sent() | {name: tensor}) == {name: "values"}
    tensor.view(-1)[3] *= 1.001
    assert classified(sent() | {name: tensor}) == {}


def test_another_layout_with_one_wrong_value_is_wrong():
    held = {name: tensor.t().contiguous() if name in MATRICES else tensor for name, tensor in sent().items()}
    held[MATRICES[2]][1, 2] *= 1.01
    assert classified(held) == {}
