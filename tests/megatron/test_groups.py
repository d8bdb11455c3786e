"""Groups of megatron-core are those that --dry-run draws, for splits of all kinds together."""

from typing import Any

import pytest

from fsdptrain.config import Config
from fsdptrain.config.grid import draw_grid
from fsdptrain.testing import spawn

SPLITS: list[tuple[int, dict[str, int]]] = [
    (16, {"tensor": 2, "pipeline": 2, "expert": 2}),
    (16, {"tensor": 2, "pipeline": 2, "context": 2, "expert": 2}),
    (16, {"pipeline": 4, "expert": 4}),
    (8, {"context": 2, "expert": 4}),
]


def numbered(num_ranks: int, split: dict[str, int]) -> dict[str, Any]:
    """The groups that `start_groups` would make: these ranks need not be there."""
    from megatron.core import parallel_state

    from fsdptrain.backends.megatron.groups import _ranks_in_order

    size = {"tensor": 1, "pipeline": 1, "context": 1, "expert": 1} | split
    one = size["tensor"] * size["pipeline"]
    with _ranks_in_order(parallel_state):
        make = parallel_state.RankGenerator
        dense = make(tp=size["tensor"], ep=1, dp=num_ranks // one // size["context"], pp=size["pipeline"],
                     cp=size["context"], order="", rank_offset=0)  # fmt: skip
        experts = make(tp=size["tensor"], ep=size["expert"], dp=num_ranks // one // size["expert"],
                       pp=size["pipeline"], cp=1, order="", rank_offset=0)  # fmt: skip
    assert dense.get_ranks("pp") == experts.get_ranks("pp")
    return {
        "packs": dense.get_ranks("tp-pp-cp"),
        "tensor": dense.get_ranks("tp"),
        "stages": dense.get_ranks("pp"),
        "context": dense.get_ranks("cp"),
        "experts": experts.get_ranks("ep"),
    }


def all_numbered() -> list[dict[str, Any]]:
    return [numbered(num_ranks, split) for num_ranks, split in SPLITS]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return spawn(1, all_numbered)[0]


@pytest.mark.parametrize("case", range(len(SPLITS)))
def test_groups_are_those_that_are_drawn(case: int, found: list[dict[str, Any]]) -> None:
    (num_ranks, split), groups = SPLITS[case], found[case]
    flags: dict[str, Any] = {f"megatron_{name}_parallel": size for name, size in split.items()}
    for line in draw_grid(Config(hf_checkpoint="x", backend="megatron", **flags), num_ranks)[1:]:
        kind, drawn = line.split(" ", 1)
        shown = [[int(rank) for rank in group.split()] for group in drawn.strip("[]").split("] [")]
        assert sorted(shown) == sorted(map(sorted, groups[kind])), kind
