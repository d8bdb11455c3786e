"""Groups of megatron-core are those that --dry-run draws, for splits of all kinds together."""

from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdptrain.config import Config
from fsdptrain.dry_run import draw_grid
from tests.megatron import cases
from tests.testing import spawn

SPLITS: list[tuple[int, dict[str, int]]] = [
    (16, {"tensor": 2, "pipeline": 2, "expert": 2}),
    (16, {"pipeline": 4, "expert": 4}),
]


def started(num_ranks: int, split: dict[str, int]) -> dict[str, list[list[int]]]:
    """Of each kind the groups of a run of so many ranks, each of which this process is for a moment."""
    from megatron.core import parallel_state as ps

    from fsdptrain.megatron.groups import process_groups

    found: dict[str, list[list[int]]] = {}
    packs: dict[int, list[int]] = {}
    for rank in range(num_ranks):
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
        cases.start(**{f"{name}_parallel": size for name, size in split.items()})
        own = process_groups()
        kinds = {"tensor": own.tp, "stages": own.pp, "experts": own.ep}
        for kind, group in kinds.items():
            ranks = sorted(dist.get_process_group_ranks(group))
            found[kind] = [*found.get(kind, []), *([ranks] if ranks[0] == rank else [])]
        packs.setdefault(ps.get_data_parallel_rank(), []).append(rank)
    return found | {"packs": [*packs.values()]}


def all_started() -> list[dict[str, list[list[int]]]]:
    return [started(num_ranks, split) for num_ranks, split in SPLITS]


@pytest.fixture(scope="module")
def found() -> list[dict[str, list[list[int]]]]:
    return spawn(1, all_started)[0]


@pytest.mark.parametrize("case", range(len(SPLITS)))
def test_groups_are_those_that_are_drawn(case: int, found: list[dict[str, list[list[int]]]]) -> None:
    (num_ranks, split), groups = SPLITS[case], found[case]
    flags: dict[str, Any] = {f"megatron_{name}_parallel": size for name, size in split.items()}
    for line in draw_grid(Config(hf_checkpoint="x", backend="megatron", **flags), num_ranks)[1:]:
        kind, drawn = line.split(" ", 1)
        shown = [[int(rank) for rank in group.split()] for group in drawn.strip("[]").split("] [")]
        assert sorted(shown) == sorted(groups[kind]), kind
