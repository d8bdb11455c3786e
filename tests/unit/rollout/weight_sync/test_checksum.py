"""A checksum depends on values and their order only."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdptrain.rollout.weight_sync.checksum import finish_checksums, start_checksum
from tests.tensors import checksum

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)


def tensor_of(seed: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return (100 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))).abs().to(dtype)


@given(st.integers(0, 99), st.integers(1, 40), st.integers(1, 40), st.sampled_from(DTYPES), st.data())
def test_a_checksum_changes_with_an_element_or_the_order(seed, rows, columns, dtype, data):
    tensor = tensor_of(seed, rows, columns, dtype)
    assert checksum(tensor) == checksum(tensor.clone()) == checksum(tensor.float())
    changed = tensor.clone()
    place = data.draw(st.integers(0, tensor.numel() - 1))
    changed.view(-1)[place] += 1 if dtype == torch.uint8 else changed.view(-1)[place] // 64 + 1
    assert checksum(changed) != checksum(tensor)
    turned = tensor.flip(0).contiguous()
    assert (checksum(turned) == checksum(tensor)) == torch.equal(turned, tensor)


@given(st.integers(0, 99), st.integers(2, 40), st.integers(2, 40), st.sampled_from(DTYPES))
def test_a_checksum_does_not_depend_on_the_memory_layout(seed, rows, columns, dtype):
    tensor = tensor_of(seed, rows, columns, dtype)
    assert checksum(tensor[1:]) == checksum(tensor[1:].clone())
    assert checksum(tensor.t()) == checksum(tensor.t().contiguous())


def test_elements_beyond_the_first_block_count():
    tensor = torch.zeros(600_000)
    sums = {checksum(tensor), checksum(tensor[1:])}
    for place in (0, 262_143, 262_144, 524_288, 599_999):
        one = tensor.clone()
        one[place] = 1
        sums.add(checksum(one))
    assert len(sums) == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_of_both_signs_are_equal(dtype):
    zeros = torch.zeros(9, dtype=dtype)
    assert checksum(zeros) == checksum(-zeros)


def test_many_checksums_at_once_are_those_of_each() -> None:
    """That they wait for the device once: tests/distributed/test_waits.py."""
    tensors = [tensor_of(seed, 300, 1 + 40 * seed, dtype) for seed, dtype in enumerate(DTYPES)] + [torch.empty(0)]
    wanted = dict(enumerate(map(checksum, tensors)))
    assert finish_checksums({i: start_checksum(tensor) for i, tensor in enumerate(tensors)}) == wanted
