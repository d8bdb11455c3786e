"""Metrics of one rank of a group, such as the last pipeline stage, are broadcast and summed once."""

import torch
import torch.distributed as dist

from fsdptrain.fsdp.metric_sums import MetricSums
from fsdptrain.types import Metrics
from tests.testing import spawn

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
