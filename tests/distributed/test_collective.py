"""A failure on one rank is raised on all ranks with the same message, and the ranks stay in step.

Metrics of one rank of a group, such as the last pipeline stage, are broadcast and summed once.
"""

import pytest
import torch
import torch.distributed as dist

from fsdptrain.distributed import gather, raise_on_all_ranks, require_same
from fsdptrain.errors import CheckpointError, DataError, FsdptrainError
from fsdptrain.fsdp.metric_sums import MetricSums
from fsdptrain.types import Metrics
from tests.testing import spawn

FAILURES = {
    "nobody": lambda rank: None,
    "one of ours": lambda rank: DataError("--input-key is wrong") if rank == 1 else None,
    "a foreign one": lambda rank: ValueError("two\nlines") if rank == 2 else None,
    "everyone": lambda rank: OSError("no disk"),
}


def test_together_raises_the_same_on_all_ranks():
    first, *others = spawn(3, _together)
    assert all(other == first for other in others)
    assert first == {
        "nobody": ("", ""),
        "one of ours": ("DataError", "--input-key is wrong (rank 1 of 3)"),
        "a foreign one": ("CheckpointError", "here: ValueError: two lines (rank 2 of 3)"),
        "everyone": ("CheckpointError", "here: OSError: no disk"),
        "in step": ("0 1 2", ""),
    }


def test_require_same_speaks_with_one_voice():
    assert spawn(2, _require_same) == [("CheckpointError", "said by rank 0")] * 2


def test_without_ranks_the_error_is_just_raised():
    assert gather(3) == [3]
    with pytest.raises(CheckpointError, match=r"here: ValueError: mine$"), raise_on_all_ranks(CheckpointError, "here"):
        raise ValueError("mine")
    with pytest.raises(CheckpointError, match=r"here: SystemExit: 0$"), raise_on_all_ranks(CheckpointError, "here"):
        raise SystemExit(0)


def test_an_interrupt_is_not_held_back():
    with pytest.raises(KeyboardInterrupt), raise_on_all_ranks(CheckpointError, "here"):
        raise KeyboardInterrupt


def _together() -> dict[str, tuple[str, str]]:
    seen = {}
    for name, failure in FAILURES.items():
        try:
            with raise_on_all_ranks(CheckpointError, "here"):
                if (error := failure(dist.get_rank())) is not None:
                    raise error
            seen[name] = ("", "")
        except FsdptrainError as error:
            seen[name] = (type(error).__name__, str(error))
    seen["in step"] = (" ".join(str(rank) for rank in gather(dist.get_rank())), "")
    return seen


def _require_same() -> tuple[str, str]:
    require_same("equal", CheckpointError("not raised"))
    try:
        require_same(dist.get_rank(), CheckpointError(f"said by rank {dist.get_rank()}"))
    except FsdptrainError as error:
        return type(error).__name__, str(error)
    return "", ""


PACKS = [{"loss/total": 1.5, "policy/ratio_max": 2.0}, {"loss/total": 0.25, "policy/ratio_max": 3.0, "mine": 4.0}]


def reduced() -> tuple[Metrics, float, bool]:
    group = dist.group.WORLD
    assert group is not None
    sums = MetricSums(copies=2)
    for pack in PACKS if dist.get_rank() == 1 else []:
        sums.add({name: torch.tensor(value) for name, value in pack.items()})
    sums.broadcast(group, src=1, device=torch.device("cpu"))
    return sums.reduce(torch.tensor(5.0))


def test_all_ranks_get_the_sums_of_one_whatever_its_packs_name() -> None:
    wanted = {"loss/total": 1.75, "policy/ratio_max": 3.0, "mine": 4.0}
    assert spawn(2, reduced) == [(wanted, 5.0, True)] * 2
