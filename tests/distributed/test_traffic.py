"""The bytes that the traffic model predicts are those that ranks send, collective by collective."""

from collections import Counter, defaultdict

import pytest
import torch
import torch.distributed as dist

from benchmarks.traffic import Axis, Kind, Pack, step_traffic
from fsdptrain.algo.losses import LOSSES
from fsdptrain.fsdp.backend import FSDPBackend
from fsdptrain.fsdp.shards import local_shard
from fsdptrain.memory.grid import Grid
from fsdptrain.memory.pieces import Pieces
from tests.families import tiny
from tests.testing import spawn

from .collectives import Collectives
from .test_fsdp_backend import GRPO, config, packs_of_this_rank, samples
from .test_parallel import context, expert, tensor

SMALL = 2048  # bytes of a step: norms, metrics and flags, which are not counted
FAMILIES = {
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {"num_experts": 8, "num_hidden_layers": 3},
    "gpt_oss": {},
    "deepseek_v2": {},  # its latent attention is split
    "deepseek_v3": {},
    "qwen3_next": {},
    "gemma4_text": {"per_layer_config": {1: {"head_dim": 32, "num_key_value_heads": 1}}},  # layers that differ
    "falcon_h1": {},  # attention and a mixer with a state side by side
}
GATHER = {"context_parallel_recurrent": "gather"}


CASES = {
    2: [
        ("qwen3", context(2)),
        ("deepseek_v3", context(2, expert_parallel_size=2)),
        ("qwen3_next", context(2, **GATHER, gradient_checkpointing=True)),
        ("falcon_h1", context(2, **GATHER)),
        ("gemma4_text", context(2)),
        ("qwen3", {}),
        ("qwen3", {"bf16": True, "fsdp_reshard_after_forward": False}),
        ("qwen3", tensor(2, logprob_chunk_size=16)),
        ("qwen3", tensor(2, gradient_checkpointing=True, bf16=True)),
        ("qwen3_moe", expert(2, gradient_checkpointing=True, gradient_checkpointing_every=2)),
        ("deepseek_v3", tensor(2, expert_parallel_size=2)),
        ("deepseek_v2", tensor(2, expert_parallel_size=2)),
    ],
    4: [
        ("qwen3", {"fsdp_replicate_size": 2}),
        ("qwen3", context(4, gradient_checkpointing=True)),  # key-value heads are repeated
        ("qwen3_moe", context(2, expert_parallel_size=2)),
        ("qwen3", context(2, tensor_parallel_size=2)),
        ("qwen3", tensor(2)),
        ("qwen3", tensor(2, fsdp_replicate_size=2)),
        ("qwen3_moe", expert(2)),
        ("qwen3_moe", expert(4, bf16=True)),
        ("qwen3_moe", tensor(2, expert_parallel_size=2, gradient_checkpointing=True)),
        ("gpt_oss", expert(2, fsdp_replicate_size=2)),
        ("qwen3_next", tensor(2, expert_parallel_size=2)),
        ("qwen3_next", context(2, tensor_parallel_size=2, expert_parallel_size=2, **GATHER)),
        ("qwen3_next", context(4, **GATHER, bf16=True)),
    ],
}
Counted = dict[tuple[Kind, tuple[int, ...]], tuple[int, float]]


def axes(grid: Grid) -> dict[tuple[int, ...], list[Axis]]:
    """The groups of this rank; several axes may be the same ranks."""
    ranks = torch.arange(grid.num_ranks)
    dense = ranks.view(grid.replicas, grid.shards, grid.tensor)
    sparse = ranks.view(grid.replicas, grid.expert_shards, grid.expert)
    shared = dense.view(grid.replicas, -1, grid.context, grid.tensor)
    rank, found = dist.get_rank(), {}
    own = {name: (x == rank).nonzero()[0].tolist() for name, x in (("dense", dense), ("sparse", sparse))}
    r, s, t = own["dense"]
    _, i, e = own["sparse"]
    for axis, members in {
        "replicate": dense[:, s, t],
        "shard": dense[r, :, t],
        "tensor": dense[r, s],
        "context": shared[r, s // grid.context, :, t],
        "expert_shard": sparse[r, :, e],
        "expert": sparse[r, i],
    }.items():
        found.setdefault(tuple(members.tolist()), []).append(axis)
    return found


def measure(cases: list[tuple[str, str, dict]]) -> list[tuple[Counted, Counted, bool]]:
    """(counted, planned, shards are those of the plan) for each."""
    results = []
    for _, checkpoint, values in cases:
        chosen = config(checkpoint, **values)
        backend = FSDPBackend(chosen, total_steps=10)
        grid = Grid.of(chosen, dist.get_world_size())
        pieces = Pieces(backend.model, grid)
        packs = packs_of_this_rank(samples(16), 128, grid.tensor * grid.context)
        with Collectives() as seen:
            backend.train_step(packs, LOSSES["grpo"], GRPO)
        by_axes, planned = axes(grid), Counter()
        calls: Counter = Counter()
        padded = backend.layout_probe.layout == "padded"
        rows = [(max(x.seqlens), len(x.seqlens)) if padded else (sum(x.seqlens), 1) for x in packs]
        tokens = [(width + -width % grid.context) * count for width, count in rows]  # columns are filled up
        sizes = [Pack(n, len(pack.loss_positions)) for n, pack in zip(tokens, packs, strict=True)]
        for found in step_traffic(backend.model, chosen, pieces, sizes):
            [group] = [ranks for ranks, names in by_axes.items() if found.axis in names]
            planned[found.kind, group] += found.size
            calls[found.kind, group] += found.calls
        expected = {key: (calls[key], planned[key]) for key in planned}
        results.append(
            ({key: (seen.calls[key], seen.bytes[key]) for key in seen.bytes}, expected, _fits(backend, pieces))
        )
    return results


def _fits(backend: FSDPBackend, pieces: Pieces) -> bool:
    """Whether the rank with most of each parameter holds what the plan says."""
    parameters = list(backend.model.parameters())
    held = torch.tensor([local_shard(p).numel() for p in parameters])
    dist.all_reduce(held, op=dist.ReduceOp.MAX)
    return held.tolist() == [pieces[p].largest_shard for p in parameters]


@pytest.mark.matrix
@pytest.mark.parametrize("world", CASES)
def test_ranks_send_and_hold_what_is_planned(world, tmp_path):
    for family, changes in FAMILIES.items():
        tiny(family, **changes).save_pretrained(tmp_path / family)
    cases = [(family, str(tmp_path / family), values) for family, values in CASES[world]]
    for (family, _, values), *ranks in zip(cases, *spawn(world, measure, cases, timeout=300), strict=True):
        name = f"{family} {values}"
        assert all(fits for _, _, fits in ranks), name
        counted, planned = (_by_kind([rank[i] for rank in ranks]) for i in (0, 1))
        for key in counted.keys() | planned.keys():
            (calls, size), (planned_calls, planned_size) = found = counted[key], planned[key]
            if key[0] == "all-reduce":
                assert abs(size - planned_size) <= world * SMALL, (name, key, found)
                assert calls >= planned_calls, (name, key, found)
            else:
                assert (calls, size) == (planned_calls, planned_size), (name, key, found)


def _by_kind(ranks: list[Counted]) -> defaultdict[tuple[Kind, int], tuple[int, float]]:
    """(calls, bytes) of all ranks together, by kind and number of ranks: what a rank sends to experts is a matter of
    routes."""
    found: defaultdict[tuple[Kind, int], tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for rank in ranks:
        for (kind, members), (calls, size) in rank.items():
            before = found[kind, len(members)]
            found[kind, len(members)] = before[0] + calls, before[1] + size
    return found
