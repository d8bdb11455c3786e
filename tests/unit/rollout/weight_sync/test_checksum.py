"""A checksum depends on content, order and length only."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdptrain.rollout.weight_sync.checksum import finish_checksums, start_checksum
from fsdptrain.rollout.weight_sync.storage_mismatch import CHECKSUM_KINDS
from tests.tensors import checksum

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8)


def tensor_of(seed: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return (100 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))).abs().to(dtype)


@given(st.integers(0, 99), st.integers(1, 40), st.integers(1, 40), st.sampled_from(DTYPES), st.data())
def test_a_checksum_changes_with_an_element_or_the_order(seed, rows, columns, dtype, data):
    tensor = tensor_of(seed, rows, columns, dtype)
    assert checksum(tensor) == checksum(tensor.clone())
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


@given(st.integers(0, 99), st.integers(1, 40), st.data())
def test_the_complement_of_a_word_has_another_checksum(seed, num_words, data):
    words = torch.randint(-(2**63), 2**63 - 1, (num_words,), generator=torch.Generator().manual_seed(seed))
    changed = words.clone()
    changed[data.draw(st.integers(0, num_words - 1))].bitwise_not_()
    assert checksum(changed) != checksum(words)
    assert checksum(torch.zeros(8 * num_words, dtype=torch.int8)) != checksum(
        torch.full((8 * num_words,), -1, dtype=torch.int8)
    )


def test_rows_beyond_the_first_block_count():
    tensor = torch.zeros(300_000)
    sums = {checksum(tensor)}
    for place in (0, 65_535, 65_536, 131_072, 299_999):
        one = tensor.clone()
        one[place] = 1
        sums.add(checksum(one))
    assert len(sums) == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_of_both_signs_are_equal(dtype):
    zeros = torch.zeros(9, dtype=dtype)
    assert checksum(zeros) == checksum(-zeros)


def test_a_multiset_depends_on_the_elements_alone() -> None:
    tensor = tensor_of(0, 7, 5, torch.bfloat16)
    turned = torch.cat([tensor.flip(0).view(-1), torch.zeros(3, dtype=tensor.dtype)])
    assert checksum(tensor, "multiset") == checksum(turned.float(), "multiset")
    changed = tensor.clone()
    changed[3, 2] += 1
    others = [changed, tensor[1:], torch.cat([tensor, tensor[:1]])]
    assert len({checksum(one, "multiset") for one in (tensor, *others)}) == 4


def test_many_checksums_wait_for_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [tensor_of(seed, 300, 1 + 40 * seed, dtype) for seed, dtype in enumerate(DTYPES)] + [torch.empty(0)]
    wanted = {(i, kind): checksum(one, kind) for i, one in enumerate(tensors) for kind in CHECKSUM_KINDS}
    calls = []
    for name in ("tolist", "item", "cpu", "numpy", "__int__", "__bool__"):
        method = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda *args, name=name, method=method: calls.append(name) or method(*args)
        )
    started = {(i, kind): start_checksum(tensors[i], kind) for i, kind in wanted}
    assert not calls
    assert finish_checksums(started) == wanted
    assert calls == ["tolist"]
