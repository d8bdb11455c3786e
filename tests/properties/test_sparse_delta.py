"""A sparse delta gives the new tensors, bit by bit, and is smaller than they are."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdptrain.vllm.worker import sparse_delta as module
from fsdptrain.vllm.worker.sparse_delta import apply_sparse_delta, sparse_delta

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.float8_e4m3fn)
BLOCKS = st.sampled_from([1, 2, 7, 64, 1 << 16])


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint8).numpy()


def smallest(old: np.ndarray, new: np.ndarray) -> int:
    """The bytes of a delta whose blocks are sent as positions and values, or whole, whichever is less."""
    size, total = 2 * module._BLOCK, len(new) % 2
    for begin in range(0, len(new) - len(new) % 2, size):
        before, after = (x[: len(x) // 2 * 2][begin : begin + size].view(np.int16) for x in (old, new))
        total += 4 + min(4 * int((before != after).sum()), after.nbytes)
    return total


def require_delta(old: np.ndarray, new: np.ndarray) -> np.ndarray | None:
    delta = sparse_delta(old, new)
    if delta is not None:
        assert len(delta) == smallest(old, new)
        assert len(delta) <= 0.75 * len(new) + 1
        held = old.copy()
        for _ in range(2):  # workers that share the memory apply it one after the other
            apply_sparse_delta(held, delta)
            assert held.tobytes() == new.tobytes()
    return delta


@given(st.binary(max_size=2000), st.binary(max_size=2000), st.integers(0, 2000), BLOCKS)
def test_the_delta_of_any_bytes_is_exact(old, new, num_changed, block):
    """`new` has the bytes of `old` in all but the first `num_changed` places, or another length."""
    kept = bytearray(old)
    kept[:num_changed] = new[: min(num_changed, len(old))]
    before, after = np.frombuffer(old, np.uint8), np.frombuffer(bytes(kept), np.uint8)
    usual, module._BLOCK = module._BLOCK, block
    try:
        require_delta(before, after)
        require_delta(after, before)
    finally:
        module._BLOCK = usual


@given(st.integers(0, 3), st.sampled_from(DTYPES), st.sampled_from([1, 100, 70_000, 200_001]), st.data())
def test_few_changed_elements_of_every_dtype_arrive_with_their_bits(seed, dtype, size, data):
    old = torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)
    new = old.clone()
    for place in data.draw(st.lists(st.integers(0, size - 1), max_size=20)):
        bits = bytes_of(new).reshape(size, -1)[place]
        bits[:] = data.draw(st.lists(st.integers(0, 255), min_size=len(bits), max_size=len(bits)))
    delta = require_delta(bytes_of(old), bytes_of(new))
    if size >= 70_000:
        assert delta is not None
        assert len(delta) < 1000


def test_zeros_of_both_signs_and_nans_with_other_payloads_are_changes() -> None:
    old = torch.zeros(1000, dtype=torch.bfloat16)
    old[7] = torch.nan
    new = old.clone()
    new[3] = -0.0
    new.view(torch.int16)[7] += 1
    assert torch.isnan(new[7])
    assert require_delta(bytes_of(old), bytes_of(new)) is not None


def test_what_has_changed_everywhere_has_no_delta() -> None:
    old = torch.randn(100_000).bfloat16()
    assert sparse_delta(bytes_of(old), bytes_of(-old)) is None
    assert sparse_delta(bytes_of(old), bytes_of(old[1:])) is None


def test_a_part_that_has_changed_everywhere_is_sent_whole() -> None:
    """As an embedding in which a few rows were trained."""
    old = torch.randn(1 << 20).bfloat16()
    new = old.clone()
    new[: 1 << 18] *= 2
    delta = require_delta(bytes_of(old), bytes_of(new))
    assert delta is not None
    assert len(delta) < 1.01 * 2 * (1 << 18)
