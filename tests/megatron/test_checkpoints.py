"""A run whose split changes at each resume is that of one split: masters and moments bitwise, steps up to rounding."""

from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fsdptrain.checkpoints import newest_checkpoint
from fsdptrain.fsdp.checkpoint_folder import CheckpointFolder
from tests.megatron import cases
from tests.megatron.training import backend_of, flags_of, state, steps
from tests.testing import spawn

# Ranks and their splits, one after the other: a tied head on two stages, a vocabulary that is padded, matrices of all
# conversions.
WAY: list[tuple[int, list[dict[str, Any]]]] = [
    (4, [{"tensor_parallel": 2, "pipeline_parallel": 2}]),
    (1, [{}]),
    (2, [{"pipeline_parallel": 2, "virtual_pipeline": 2}, {"tensor_parallel": 2}]),
]


class Step(NamedTuple):
    before: dict[str, Tensor]  # masters and moments, whole, by names in the files
    norms: list[float]
    after: dict[str, Tensor]


def go_on(folder: Path, run: Path, layouts: list[dict[str, Any]]) -> list[Step]:
    """With each split from the newest checkpoint of `run`, if there is one, two steps and a checkpoint."""
    found = []
    for layout in layouts:
        backend = backend_of(folder, **flags_of(layout))
        checkpoints = CheckpointFolder(run, keep_last=1)
        latest = newest_checkpoint(checkpoints.directory.parent)
        step = 2 + (backend.load(latest) if latest is not None else 0)
        before = state(backend)
        norms = steps(backend, 2)  # the second by weights that the moments have moved
        checkpoints.write(step, lambda path, save=backend.save, step=step: save(path, step))
        found.append(Step(before, norms, state(backend)))
    return found


def alone(folder: Path, count: int) -> list[float]:
    return steps(backend_of(folder), count)


@pytest.mark.matrix
def test_a_run_goes_on_over_any_split(tmp_path: Path) -> None:
    folder = cases.save("qwen3", tmp_path / "model", tie_word_embeddings=True, num_hidden_layers=4)
    ranks = [spawn(num_ranks, go_on, folder, tmp_path / "run", layouts) for num_ranks, layouts in WAY]
    taken = [step for found in ranks for step in zip(*found, strict=True)]  # of each the ranks
    for before, after in pairwise(taken):
        wanted = before[0].after
        for rank in after:
            assert rank.before.keys() == wanted.keys()
            assert [name for name in wanted if not torch.equal(rank.before[name], wanted[name])] == []
    (norms,) = spawn(1, alone, folder, 2 * len(taken))
    for i, step in enumerate(taken):
        for rank in step:
            assert rank.norms == pytest.approx(norms[2 * i : 2 * i + 2], rel=1e-5)
