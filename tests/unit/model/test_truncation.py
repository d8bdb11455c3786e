"""Tokens kept by truncated sampling, by definition and by the filters of transformers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fsdptrain.model.running_sums import running_sums
from fsdptrain.model.truncation import smallest_kept
from fsdptrain.types import UNTRUNCATED, Truncation


def truncations() -> st.SearchStrategy[Truncation]:
    return st.builds(
        Truncation,
        top_p=st.sampled_from([1.0, 0.95, 0.7, 0.3, 1e-9]),
        top_k=st.sampled_from([-1, 1, 2, 5, 100]),
        min_p=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    )


def head_of(row: list[float], truncation: Truncation) -> set[int]:
    """min_p and top_k, then top_p among the rest, and tokens as likely as the last one."""
    weights = [math.exp(x - max(row)) for x in row]
    likeliest_first = sorted(range(len(row)), key=lambda i: -row[i])
    left = [i for i in likeliest_first if weights[i] >= truncation.min_p]
    if truncation.top_k > 0:
        left = [i for i in left if row[i] >= row[likeliest_first[min(truncation.top_k, len(row)) - 1]]]
    total, so_far, last = math.fsum(weights[i] for i in left), 0.0, left[0]
    for i in left:
        if so_far / total >= truncation.top_p:
            break
        so_far, last = so_far + weights[i], i
    return {i for i in left if row[i] >= row[last]}


def kept(logits: Tensor, truncation: Truncation) -> list[set[int]]:
    inside = logits >= smallest_kept(logits, truncation)[:, None]
    return [set(row.nonzero()[:, 0].tolist()) for row in inside]


@settings(max_examples=150)
@given(
    truncation=truncations(), rows=st.integers(1, 4), vocab=st.sampled_from([1, 2, 7, 300]),
    levels=st.sampled_from([3, 10**6]), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_kept_tokens_follow_the_definition_with_ties(truncation, rows, vocab, levels, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(levels, (rows, vocab), generator=generator).double() / levels * 5
    assert kept(logits, truncation) == [head_of(row, truncation) for row in logits.tolist()]


def test_top_p_applies_after_top_k_and_min_p() -> None:
    logits = torch.tensor([[0.05, 0.4, 0.25, 0.1, 0.2]]).log()
    assert kept(logits, Truncation(top_p=0.6)) == [{1, 2}]
    assert kept(logits, Truncation(top_p=0.6, top_k=2)) == [{1}]  # 0.4 of 0.65
    assert kept(logits, Truncation(top_p=0.6, min_p=0.6)) == [{1}]  # the same two are left


def test_sorting_in_parts_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(30, 64, generator=torch.Generator().manual_seed(1))
    truncation = Truncation(top_p=0.5, min_p=0.01)
    whole = smallest_kept(logits, truncation)
    monkeypatch.setattr("fsdptrain.model.truncation._MAX_ELEMENTS", 64 * 7)
    assert torch.equal(smallest_kept(logits, truncation), whole)


def test_truncation_is_off_by_default() -> None:
    assert not UNTRUNCATED
    assert not Truncation(top_k=-1)
    assert all([Truncation(top_p=0.9), Truncation(top_k=1), Truncation(min_p=0.1)])
    assert torch.isneginf(smallest_kept(torch.randn(3, 9), UNTRUNCATED)).all()


@pytest.mark.parametrize("length", [1, 127, 128, 129, 16_384, 20_001])
def test_running_sums(length: int) -> None:
    values = torch.rand(3, length, dtype=torch.float64, generator=torch.Generator().manual_seed(length))
    torch.testing.assert_close(running_sums(values), values.cumsum(-1), rtol=1e-12, atol=0.0)
