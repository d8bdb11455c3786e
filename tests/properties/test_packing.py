"""Properties of plans and packs (docs/architecture.md, invariants 1 to 3)."""

import itertools
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdptrain.algo.weights import AGGREGATIONS, count_totals, num_loss_tokens
from fsdptrain.data.packing.pack import assign_packs_to_ranks, drop_overlong, pack, plan_packs
from fsdptrain.data.packing.padded import plan_rows
from fsdptrain.errors import ConfigError
from fsdptrain.types import Images, PackedBatch, Sample
from tests.properties.strategies import sample_lists

BUDGET = 64
BOTH_PLANS = pytest.mark.parametrize("plan_them", [plan_packs, plan_rows])
any_lengths = st.lists(st.integers(1, BUDGET), max_size=60)
# Lengths that fill some packs exactly, cut at random, so that there is no spare room.
cuts = st.sets(st.integers(1, BUDGET - 1), max_size=4).map(lambda at: [0, *sorted(at), BUDGET])
tight_lengths = st.lists(cuts, max_size=12).map(lambda packs: [b - a for p in packs for a, b in itertools.pairwise(p)])
lengths_lists = any_lengths | tight_lengths


def packed(samples: list[Sample], aggregation: str = "token_mean") -> PackedBatch:
    totals = count_totals([num_loss_tokens(sample) for sample in samples])
    return pack(samples, aggregation=aggregation, totals=totals, max_response_len=24)


@BOTH_PLANS
@given(lengths=lengths_lists, num_ranks=st.integers(1, 8))
def test_a_plan_has_every_sample_once_in_equally_many_packs_within_the_budget(plan_them, lengths, num_ranks) -> None:
    plan = plan_them(lengths, num_ranks=num_ranks, max_tokens=BUDGET)
    packs = [[lengths[i] for i in pack] for rank in plan.packs for pack in rank]
    assert sorted(i for rank in plan.packs for pack in rank for i in pack) == list(range(len(lengths)))
    assert {len(rank) for rank in plan.packs} == {len(plan.packs[0])}
    assert len(plan.packs) == num_ranks
    assert len(plan.packs[0]) >= 1
    assert max(sum(pack) for pack in packs) <= BUDGET
    assert plan_them is plan_packs or max(len(pack) * max(pack, default=0) for pack in packs) <= BUDGET  # padded
    assert plan == plan_them(tuple(lengths), num_ranks=num_ranks, max_tokens=BUDGET)


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
@pytest.mark.parametrize("seed", range(3))
def test_realistic_plans_are_full_and_balanced(num_ranks: int, seed: int) -> None:
    """Realistic response lengths (lognormal): the fewest packs that hold the tokens, and balanced ranks."""
    draw = random.Random(seed)
    lengths = [min(8000, max(20, int(draw.lognormvariate(6.5, 0.8)))) for _ in range(1024)]
    plan = plan_packs(lengths, num_ranks=num_ranks, max_tokens=8192)
    assert len(plan.packs[0]) == math.ceil(math.ceil(sum(lengths) / 8192) / num_ranks)
    assert plan.fill == pytest.approx(sum(lengths) / (len(plan.packs[0]) * num_ranks * 8192))
    assert plan.imbalance < 0.02


def test_balance_counts_the_quadratic_cost() -> None:
    """Two long and many short sequences of as many tokens: the long ones must be on different ranks, and cost more."""
    lengths = [4000, 4000] + [100] * 80
    plan = plan_packs(lengths, num_ranks=2, max_tokens=10_000, quadratic_cost=1 / 1000)
    assert [sum(lengths[i] == 4000 for i in packs[0]) for packs in plan.packs] == [1, 1]
    lengths = [4000] + [100] * 80
    (long,), (short,) = plan_packs(lengths, num_ranks=2, max_tokens=10_000, quadratic_cost=1 / 1000).packs
    assert (len(long), len(short)) in {(1, 80), (80, 1)}, "the long one alone costs more than all the others"


def test_ranks_take_packs_of_similar_cost_in_rounds_and_the_one_behind_takes_the_costliest() -> None:
    costs = [1.0, 10.0, 5.0, 6.0, 3.0, 4.0]  # of packs 0 to 5
    plan = assign_packs_to_ranks([[i] for i in range(6)], costs, num_tokens=6, num_ranks=2, max_tokens=3)
    assert plan.packs == (((1,), (5,), (0,)), ((3,), (2,), (4,)))
    assert plan.cost == 10 + 5 + 3
    assert plan.imbalance == pytest.approx(1 - 29 / (2 * 18))


@BOTH_PLANS
def test_a_plan_of_nothing_has_no_cost_and_is_balanced(plan_them) -> None:
    plan = plan_them([], num_ranks=2, max_tokens=BUDGET)
    assert (plan.cost, plan.imbalance, plan.fill) == (0.0, 0.0, 0.0)


def test_rows_that_fill_the_budget_exactly_share_a_pack() -> None:
    assert plan_rows([4, 3, 4], num_ranks=1, max_tokens=12).packs == (((0, 2, 1),),)


def test_a_sample_longer_than_the_budget_is_an_error_that_names_the_flags() -> None:
    with pytest.raises(ConfigError, match=r"--max-tokens-per-gpu .* 64 .* 65 tokens.*--overlong-samples drop"):
        plan_packs([3, 65], num_ranks=1, max_tokens=64)


def test_overlong_samples_are_dropped_and_counted_or_an_error() -> None:
    samples = [Sample("g", [1] * n, [False] * n, [0.0] * n) for n in (3, 9, 4)]
    assert drop_overlong(samples, max_tokens=8, overlong_samples="drop") == ([samples[0], samples[2]], 1)
    with pytest.raises(ConfigError, match=r"--max-tokens-per-gpu .* 8 is"):
        drop_overlong(samples, max_tokens=8, overlong_samples="error")
    assert drop_overlong(samples, max_tokens=9, overlong_samples="error") == (samples, 0)


@given(samples=sample_lists(min_size=1))
def test_fields_at_t_describe_the_token_after_t(samples: list[Sample]) -> None:
    batch = packed(samples)
    for sample, start, end in zip(samples, batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        assert batch.input_ids[start:end].tolist() == sample.token_ids
        assert batch.position_ids[start:end].tolist() == list(range(len(sample.token_ids)))
        assert batch.labels[start : end - 1].tolist() == sample.token_ids[1:]
        assert batch.loss_mask[start : end - 1].tolist() == sample.loss_mask[1:]
        assert torch.equal(batch.rollout_logprobs[start : end - 1], torch.tensor(sample.rollout_logprobs[1:]))
        advantages = torch.tensor([sample.advantage if m else 0.0 for m in sample.loss_mask[1:]])
        assert torch.equal(batch.advantages[start : end - 1], advantages)
        last = [batch.labels, batch.loss_mask, batch.loss_weights, batch.advantages, batch.rollout_logprobs]
        assert not any(column[end - 1] for column in last), "the last token of a segment predicts nothing"
    assert batch.loss_positions.tolist() == (batch.loss_mask.nonzero().flatten().tolist() or [0])
    assert ((batch.loss_weights > 0) == batch.loss_mask).all()


@given(samples=sample_lists(min_size=1), zeros=st.integers(1, 3))
def test_token_id_0_is_a_token_like_others(samples: list[Sample], zeros: int) -> None:
    renamed = [Sample(**{**vars(s), "token_ids": [t if t > zeros else 0 for t in s.token_ids]}) for s in samples]
    ours, theirs = packed(samples), packed(renamed)
    for name, value in vars(ours).items():
        if name in ("input_ids", "labels"):
            continue
        other = getattr(theirs, name)
        assert torch.equal(value, other) if isinstance(value, torch.Tensor) else np.array_equal(value, other), name


@given(samples=sample_lists(min_size=1), aggregation=st.sampled_from(sorted(AGGREGATIONS)))
def test_weights_have_the_sum_of_the_aggregation(samples: list[Sample], aggregation: str) -> None:
    counts = [num_loss_tokens(sample) for sample in samples]
    total = packed(samples, aggregation).loss_weights.double().sum().item()
    sequences = sum(count > 0 for count in counts)
    promised = {
        "token_mean": 1.0,
        "sequence_mean": 1.0,
        "fixed_length": sum(counts) / (max(1, sequences) * 24),
        "sequence_sum": sum(counts) / max(1, sequences),
    }
    assert total == pytest.approx(promised[aggregation] if sequences else 0.0, rel=1e-6)


def test_a_pack_has_the_images_of_each_samples_group() -> None:
    samples = [Sample(group, [7, 8, 9], [False, True, True], [0.0, -1.0, -1.0]) for group in ("a", "b", "a")]
    of_a = Images({"pixels": torch.tensor([1.0])}, torch.tensor([0, 1]))
    totals = count_totals([2, 2, 2])
    batch = pack(samples, aggregation="token_mean", totals=totals, max_response_len=2, images={"a": of_a})
    assert batch.images is not None
    assert batch.images.inputs["pixels"].tolist() == [1.0, 1.0]
    assert batch.images.token_types.tolist() == [0, 1, 0, 0, 0, 0, 0, 1, 0]


def test_an_empty_pack_has_one_token_without_weight() -> None:
    batch = packed([])
    assert batch.seqlens == (1,)
    assert batch.cu_seqlens.tolist() == [0, 1]
    assert not batch.loss_mask.any()
    assert batch.loss_weights.sum() == 0
    assert batch.loss_positions.tolist() == [0]
