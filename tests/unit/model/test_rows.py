"""Both layouts have the same tokens and return them in the order of the pack."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdptrain.model.attention.attention import SEGMENTS, attention_kwargs
from fsdptrain.model.policy import plain_batch
from fsdptrain.model.rows import core_rows

CPU = torch.device("cpu")
SEGMENT_LISTS = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=9), min_size=1, max_size=6)


@settings(max_examples=50, deadline=None)
@given(segments=SEGMENT_LISTS, pad_token_id=st.sampled_from([None, 0, 7]))
def test_padded_rows_have_each_segment_at_the_left(segments: list[list[int]], pad_token_id: int | None) -> None:
    batch = plain_batch(segments, device=CPU)
    inputs = core_rows(batch, "padded", SEGMENTS).inputs(pad_token_id=pad_token_id)
    rows = inputs["input_ids"].tolist()
    assert [row[: len(segment)] for row, segment in zip(rows, segments, strict=True)] == segments
    fill = [token for row, segment in zip(rows, segments, strict=True) for token in row[len(segment) :]]
    assert pad_token_id not in fill


@settings(max_examples=50, deadline=None)
@given(segments=SEGMENT_LISTS, step=st.integers(1, 4))
def test_gathered_tokens_are_in_the_order_of_the_pack(segments: list[list[int]], step: int) -> None:
    batch = plain_batch(segments, device=CPU)
    positions = torch.arange(0, batch.num_tokens, step)
    for layout in ("packed", "padded"):
        rows = core_rows(batch, layout, SEGMENTS)
        hidden = rows.inputs(pad_token_id=None)["input_ids"][..., None].double()  # [1, T, 1] or [N, S, 1]
        found = rows.gather(hidden.flatten(0, 1), positions)
        assert torch.equal(found[:, 0].long(), batch.input_ids[positions])


def test_all_boundary_arguments_agree() -> None:
    batch = plain_batch([[1, 2, 3], [4], [5, 6]], device=CPU)
    found = attention_kwargs(batch.seqlens, batch.cu_seqlens)
    assert found["boundaries"].seqlens == (3, 1, 2)
    assert found["cu_seq_lens_q"].tolist() == found["cu_seq_lens_k"].tolist() == [0, 3, 4, 6]
    assert found["max_length_q"] == found["max_length_k"] == 3
    assert found["seq_idx"].tolist() == [[0, 0, 0, 1, 2, 2]]


def test_stock_attention_gets_no_boundary_arguments() -> None:
    batch = plain_batch([[1, 2, 3], [4]], device=CPU)
    assert set(core_rows(batch, "padded", "sdpa").inputs(pad_token_id=0)) == {"input_ids", "use_cache"}
