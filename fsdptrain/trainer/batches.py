"""From the samples of all ranks to the packs that this rank trains on, one list for each optimizer step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

import torch.distributed as dist

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.data.packing.exchange import SampleIndex, exchange_samples, gather_index
from fsdptrain.data.packing.pack import NO_IMAGES, PackPlan, pack, plan_packs, plan_rows
from fsdptrain.features.prefix_sharing.plan import plan_shared
from fsdptrain.model.inputs import Layout
from fsdptrain.types import Images, PackedBatch, Sample

Members = tuple[tuple[tuple[int, ...], ...], ...]  # [rank][pack] -> samples, by their number in the index of all ranks


@dataclass(frozen=True)
class PackingRules:
    max_tokens: int  # of one pack
    aggregation: str
    max_response_len: int
    steps_per_epoch: int  # optimizer steps that share the rollout
    num_epochs: int  # times that the whole rollout is trained on
    seed: int
    layout: Layout  # padded: a pack computes samples x longest tokens, and that is what the budget bounds
    sharing: Literal["auto", "on", "off"] = "off"  # compute the prompt of a group once; auto: where that is cheaper
    copies: int = 1  # neighbouring ranks that share the work of one, and so train on the same packs
    row_multiple: int = 1  # padded rows are as long as this divides: their columns are dealt over so many

    @classmethod
    def of(cls, config: Config, *, layout: Layout, shares_prefixes: bool) -> "PackingRules":
        """Those of a run, whose model computes packs of `layout`, and may share prefixes."""
        return cls(
            max_tokens=config.max_tokens_per_pack,
            aggregation=config.algorithm.loss_aggregation,
            max_response_len=config.rollout.max_response_len,
            steps_per_epoch=config.steps_per_rollout // config.batch.epochs_per_rollout,
            num_epochs=config.batch.epochs_per_rollout,
            seed=config.run.seed,
            layout=layout,
            sharing=config.batch.prefix_sharing if shares_prefixes else "off",
            copies=config.pack_copies,
            row_multiple=config.parallel.context_parallel_size,
        )


@dataclass(frozen=True)
class StepBatches:
    """The packs of one optimizer step on this rank; every rank has as many."""

    packs: list[PackedBatch]
    members: Members  # the same on every rank
    index: SampleIndex  # of all samples of the rollout
    fill: float
    imbalance: float
    shared: float = 0.0  # share of the tokens that are computed with those of another sample


def make_batches(
    samples: Sequence[Sample], rules: PackingRules, *, rollout: int, images: Mapping[str, Images] = NO_IMAGES
) -> list[StepBatches]:
    """Plan on the lengths of all ranks, send each sample to the rank that trains it, pack. Collective.

    The steps of all epochs, one after the other; `rollout` is the number of the rollout in the run. There are as many
    as `rules` say however few the samples are, for the learning rate follows them: a step may be without any. No step
    at all if there is no sample on any rank. `images` of all prompts of the rollout, by their ids, are on every rank.
    """
    index = gather_index(samples)
    if not index.lengths:
        return []
    return [
        _make_step(samples, index, chosen, rules, images)
        for epoch in range(rules.num_epochs)
        for chosen in deal(index.keys, rules.steps_per_epoch, seed=f"{rules.seed}/{rollout}/{epoch}")
    ]


def deal(keys: Sequence[int], num_steps: int, *, seed: str) -> list[list[int]]:
    """Indices for each step, drawn at random, as even as they can be.

    Which samples share a step follows from `seed` and the set of `keys`, not from the order in which the ranks hold
    them. The samples of a group are dealt one by one: their advantages are there already.
    """
    order = sorted(range(len(keys)), key=keys.__getitem__)
    Random(seed).shuffle(order)
    return [sorted(order[step::num_steps]) for step in range(num_steps)]


def _make_step(
    samples: Sequence[Sample],
    index: SampleIndex,
    chosen: Sequence[int],
    rules: PackingRules,
    images: Mapping[str, Images],
) -> StepBatches:
    lengths = [index.lengths[i] for i in chosen]
    plan = _plan(lengths, [index.prompts[i] for i in chosen], rules)
    planned = [tuple(tuple(chosen[i] for i in packed) for packed in packs) for packs in plan.packs]
    members = tuple(packs for packs in planned for _ in range(rules.copies))
    destinations = [[i for packed in packs for i in packed] for packs in members]
    arrived = iter(exchange_samples(samples, destinations, index=index))
    totals = index.totals(chosen)
    packs = [
        pack(
            [next(arrived) for _ in packed],
            aggregation=rules.aggregation,
            totals=totals,
            max_response_len=rules.max_response_len,
            pin_memory=platform.has_accelerator(),
            images=images,
            sharing=plan.shared > 0,
        )
        for packed in members[dist.get_rank()]
    ]
    return StepBatches(packs, members, index, plan.fill, plan.imbalance, plan.shared)


def _plan(lengths: Sequence[int], prompts: Sequence[tuple[int, int]], rules: PackingRules) -> PackPlan:
    num_ranks = dist.get_world_size() // rules.copies
    if rules.sharing != "off":
        assert rules.layout == "packed", "only packs can share"
        always = rules.sharing == "on"
        return plan_shared(lengths, prompts, num_ranks=num_ranks, max_tokens=rules.max_tokens, always=always)
    if rules.layout == "packed":
        return plan_packs(lengths, num_ranks=num_ranks, max_tokens=rules.max_tokens)
    rows = [length + -length % rules.row_multiple for length in lengths]
    return plan_rows(rows, num_ranks=num_ranks, max_tokens=rules.max_tokens)
