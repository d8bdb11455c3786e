"""Ranks of a context-parallel group share the tokens of a pack, without a read by the host."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdptrain.features.context_parallel.rows import UlyssesRows
from fsdptrain.features.context_parallel.ulysses import UlyssesGroup
from fsdptrain.model.policy import plain_batch
from fsdptrain.types import positions_of
from tests.distributed.test_waits import Reads
from tests.unit.model.test_rows import CPU, SEGMENT_LISTS


@settings(max_examples=50, deadline=None)
@given(segments=SEGMENT_LISTS, size=st.integers(2, 4))
def test_each_token_is_on_one_rank_and_the_host_reads_nothing(segments, size) -> None:
    batch = plain_batch(segments, device=CPU)
    mask = torch.arange(batch.num_tokens) % 3 == 1
    positions = positions_of(mask)
    batch = replace(batch, loss_mask=mask, loss_positions=positions, loss_places=positions.numpy())
    every, losing = [], []
    for rank in range(size):
        group = UlyssesGroup(None, rank, size)  # type: ignore[arg-type] # nothing is sent
        with Reads() as seen:
            rows = UlyssesRows(batch, group)
            tokens, with_loss = rows.tokens, rows.loss_positions
            found = rows.gather(rows.scatter(batch.input_ids, fill=0))
        assert not seen.calls, "on a GPU it would wait for all work before it"
        assert torch.equal(found, batch.input_ids[tokens])
        assert set(with_loss.tolist()) == set(tokens.tolist()) & set(positions.tolist())
        assert with_loss.tolist() == sorted(with_loss.tolist())
        every += tokens.tolist()
        losing += with_loss.tolist()
    assert sorted(every) == list(range(batch.num_tokens))
    assert sorted(losing) == positions.tolist()
