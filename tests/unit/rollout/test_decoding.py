"""Chunks hold every row once and stay within the budget; finished rows leave the cache."""

from hypothesis import given
from hypothesis import strategies as st

from fsdptrain.rollout.decoding import Row, plan_chunks


@given(
    lengths=st.lists(st.integers(1, 50), max_size=20),
    num_samples=st.integers(1, 5),
    max_tokens=st.integers(1, 30),
    spare=st.integers(0, 500),
)
def test_chunks_hold_every_row_once_within_the_budget(lengths, num_samples, max_tokens, spare):
    budget = max(lengths, default=0) + max_tokens + spare
    chunks = plan_chunks(lengths, num_samples=num_samples, max_tokens=max_tokens, max_batch_tokens=budget)
    rows = [row for chunk in chunks for row in chunk]
    assert sorted(rows, key=lambda row: (row.prompt, row.sample)) == [
        Row(i, k) for i in range(len(lengths)) for k in range(num_samples)
    ]
    for chunk in chunks:
        width = max(lengths[row.prompt] for row in chunk) + max_tokens
        assert len(chunk) * width <= budget
    ordered = [lengths[row.prompt] for row in rows]
    assert ordered == sorted(ordered, reverse=True)
