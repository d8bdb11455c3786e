"""Ranks of a context-parallel group share the tokens of a pack, without a read by the host."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fsdptrain.features.context_parallel.rows import UlyssesRows
from fsdptrain.features.context_parallel.ulysses import UlyssesGroup
from fsdptrain.model.policy import plain_batch
from fsdptrain.types import positions_of
from tests.unit.model.test_rows import CPU, SEGMENT_LISTS


class NoHostReads(TorchDispatchMode):
    """Fail at an operation whose result the host needs: on a GPU it would wait for all work before it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in ("nonzero", "masked_select", "_local_scalar_dense", "unique_dim", "_unique2"), name
        masks = [x for x in (args[1] if name == "index" else []) if x is not None and x.dtype is torch.bool]
        assert not masks
        return func(*args, **(kwargs or {}))


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
        with NoHostReads():
            rows = UlyssesRows(batch, group)
            tokens, with_loss = rows.tokens, rows.loss_positions
            found = rows.gather(rows.scatter(batch.input_ids, fill=0))
        assert torch.equal(found, batch.input_ids[tokens])
        assert set(with_loss.tolist()) == set(tokens.tolist()) & set(positions.tolist())
        assert with_loss.tolist() == sorted(with_loss.tolist())
        every += tokens.tolist()
        losing += with_loss.tolist()
    assert sorted(every) == list(range(batch.num_tokens))
    assert sorted(losing) == positions.tolist()
