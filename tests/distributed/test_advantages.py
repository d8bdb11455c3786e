"""Advantages over a batch do not depend on how groups are distributed over ranks, some of which have no samples."""

import pytest
import torch.distributed as dist

from fsdptrain.algo.advantages import ADVANTAGES, AdvantageRule, assign_advantages, scale_over_batch
from fsdptrain.trainer.metrics import reduce_sums
from fsdptrain.types import Sample
from tests.testing import spawn

RULES = [
    AdvantageRule(ADVANTAGES["dr_grpo"], "batch"),
    AdvantageRule(ADVANTAGES["dr_grpo"], "whiten"),
    AdvantageRule(ADVANTAGES["grpo"], "group"),
]


def batch() -> list[Sample]:
    """Four groups of four; rewards of 0 and 1 that no group shares, and one sample that could not be scored."""
    samples = []
    for at in range(16):
        length, parts = 1 + at * 7 % 5, {"math": float(at * at % 7 < 3), "format": float(at % 3 == 0)}
        reward = None if at == 6 else sum(parts.values())
        mask = [False] + [True] * length
        samples.append(Sample(f"g{at // 4}", [1] * len(mask), mask, [0.0] * len(mask), reward=reward, rewards=parts))
    return samples


def of_this_rank(starts: list[int]) -> list[list[float]]:
    rank = dist.get_rank()
    share = batch()[starts[rank] : starts[rank + 1]]
    made = [scale_over_batch(assign_advantages(share, rule), rule, reduce_sums) for rule in RULES]
    return [[sample.advantage for sample in samples] for samples in made]


def test_advantages_do_not_depend_on_how_groups_lie_on_ranks() -> None:
    starts = [0, 8, 8, 16]
    by_rank = spawn(len(starts) - 1, of_this_rank, starts)
    for at, rule in enumerate(RULES):
        alone = [s.advantage for s in scale_over_batch(assign_advantages(batch(), rule), rule, dict)]
        assert [a for made in by_rank for a in made[at]] == pytest.approx(alone, rel=1e-12, abs=1e-12)
        assert any(alone)
