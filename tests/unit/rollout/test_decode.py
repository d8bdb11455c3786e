"""Chunks contain every row once within the budget. Prompts are read once, and finished rows leave the cache."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdptrain.rollout.embedded.decode import Row, decode, plan_chunks
from fsdptrain.types import Prompt, SamplingParams
from tests.exact import Exact, in_float64
from tests.testing import tiny_qwen3

STOP = list(range(5, 30))  # each token ends a row with a chance of about one in ten


@given(
    lengths=st.lists(st.integers(1, 50), max_size=20),
    num_samples=st.integers(1, 5),
    limits=st.lists(st.integers(1, 30), min_size=20, max_size=20),
    spare=st.integers(0, 500),
)
def test_chunks_hold_every_row_once_within_the_budget(lengths, num_samples, limits, spare):
    budget = max((length + limit for length, limit in zip(lengths, limits, strict=False)), default=0) + spare
    chunks = plan_chunks(lengths, limits, num_samples=num_samples, max_batch_tokens=budget)
    rows = [row for chunk in chunks for row in chunk]
    assert sorted(rows, key=lambda row: (row.prompt, row.sample)) == [
        Row(i, k) for i in range(len(lengths)) for k in range(num_samples)
    ]
    for chunk in chunks:
        width = max(lengths[row.prompt] for row in chunk) + max(limits[row.prompt] for row in chunk)
        assert len(chunk) * width <= budget
    ordered = [lengths[row.prompt] for row in rows]
    assert ordered == sorted(ordered, reverse=True)


def test_each_prompt_is_read_once_and_rows_grow_by_one_token_and_leave_when_they_end():
    shapes: list[tuple[int, int]] = []
    model = in_float64(tiny_qwen3().eval())
    model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    prompts = [Prompt(str(ids), ids, "") for ids in ([200], [201] * 12, [202] * 5)]
    uniforms = torch.rand(60, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    options = {"sampling": SamplingParams(num_samples=20, max_tokens=40), "stop_token_ids": STOP, "sync_interval": 1}
    with Exact(), torch.inference_mode():
        decode(model, prompts, [row % 3 for row in range(60)], [40] * 60, uniforms, **options)
    assert shapes[0] == (3, 12)
    rows = [row for row, _ in shapes[1:]]
    assert 60 >= rows[0] >= 45
    assert rows == sorted(rows, reverse=True)
    assert rows[-1] < 20
    assert {width for _, width in shapes[1:]} == {1}
