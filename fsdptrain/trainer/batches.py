"""Build the packs that this rank trains on, one list per optimizer step, from the samples of all ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

import torch.distributed as dist

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.data.packing.pack import NO_IMAGES, PackPlan, pack, plan_packs
from fsdptrain.data.packing.sample_index import SampleIndex, gather_index
from fsdptrain.enabled_features import NO_FEATURES, Features
from fsdptrain.errors import DataError
from fsdptrain.model.rows import Layout
from fsdptrain.trainer.metrics import reduce_sums
from fsdptrain.trainer.samples.source import RolloutBatch
from fsdptrain.types import Images, PackedBatch, Sample


@dataclass(frozen=True)
class PackingRules:
    max_tokens: int  # per pack
    aggregation: str
    max_response_len: int
    num_steps: int  # optimizer steps per pass over the rollout
    seed: int
    layout: Layout  # padded: a pack costs num_samples x longest sample in tokens, and max_tokens bounds that
    copies: int = 1  # adjacent ranks that share one pack's work and so train on the same packs
    features: Features = NO_FEATURES
    skips_zero_advantage: bool = False  # pack no samples whose advantage is 0

    @classmethod
    def of(cls, config: Config, *, layout: Layout, features: Features = NO_FEATURES) -> "PackingRules":
        """Build the rules for a model that computes packs of `layout`."""
        return cls(
            max_tokens=config.max_tokens_per_pack,
            aggregation=config.algorithm.loss_aggregation,
            max_response_len=config.rollout.max_response_len,
            num_steps=config.steps_per_rollout // config.batch.epochs_per_rollout,
            seed=config.run.seed,
            layout=layout,
            copies=config.pack_copies,
            skips_zero_advantage=not config.trains_zero_advantage,
            features=features,
        )


@dataclass(frozen=True)
class StepBatches:
    """The packs of one optimizer step on this rank. All ranks have the same number of packs."""

    packs: list[PackedBatch]
    fill: float
    imbalance: float
    shared: float = 0.0  # fraction of tokens that are computed together with those of another sample
    num_tokens: int = 0  # of all samples of the step
    num_skipped: int = 0  # of these, those in no pack, because the advantage of their sample is 0


def make_batches(
    samples: Sequence[Sample], rules: PackingRules, *, rollout: int, images: Mapping[str, Images] = NO_IMAGES
) -> list[StepBatches]:
    """Plan packs from the lengths on all ranks, send each sample to the rank that trains on it, and pack. Collective.

    The number of steps always follows `rules`, because the learning-rate schedule depends on it; a step may have no
    samples. Returns no steps if no rank has a sample.

    Args:
        rollout: number of the rollout in the run.
        images: images of all prompts of the rollout by prompt id, on every rank.
    """
    index = gather_index(samples)
    if not index.lengths:
        return []
    return [
        _make_step(samples, index, chosen, rules, images)
        for chosen in assign_to_steps(index.keys, rules.num_steps, seed=f"{rules.seed}/{rollout}/0")
    ]


def in_epochs(steps: Sequence[StepBatches], num_epochs: int, *, seed: str) -> list[StepBatches]:
    """Return the steps of all epochs: those of the first one, then the same ones in another order each."""
    shuffle = Random(seed)
    return [*steps, *(step for _ in range(num_epochs - 1) for step in shuffle.sample(steps, len(steps)))]


def pack_rollout(config: Config, rollout: RolloutBatch, rules: PackingRules, step: int) -> list[StepBatches]:
    """Pack the samples of a rollout of the policy of version `step`. Raises DataError if none is left. Collective."""
    samples = [replace(each, advantage=s.advantage, others=()) for s in rollout.samples for each in s.sequences]
    if config.shaping.mask_truncated:
        from fsdptrain.algo.shaping import without_truncated

        samples = without_truncated(samples)
    steps = make_batches(samples, rules, rollout=step, images=rollout.images)
    if not steps:
        raise DataError(_why_nothing_is_left(config, rollout))
    return steps


def _why_nothing_is_left(config: Config, rollout: RolloutBatch) -> str:
    counts = reduce_sums({"samples": len(rollout.samples), "dropped": rollout.num_dropped})
    if counts["dropped"] and not counts["samples"]:
        return (
            f"--overlong-samples drop left nothing to train on: all {counts['dropped']:.0f} samples are longer than "
            f"{config.pack_budget}; raise it"
        )
    return (
        f"--mask-truncated left nothing to train on: all {counts['samples']:.0f} responses were cut off at "
        f"--rollout-max-response-len {config.rollout.max_response_len}; raise it"
    )


def assign_to_steps(keys: Sequence[int], num_steps: int, *, seed: str) -> list[list[int]]:
    """Split sample indices randomly and evenly over the steps.

    The assignment depends on `seed` and the set of `keys`, not on the order in which ranks hold the samples. Samples of
    one group may go to different steps, because their advantages are already computed.
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
    kept = [i for i in chosen if index.has_advantage[i]] if rules.skips_zero_advantage else chosen
    lengths = [index.lengths[i] for i in kept]
    plan = _plan(lengths, [index.prompts[i] for i in kept], rules)
    planned = [tuple(tuple(kept[i] for i in packed) for packed in packs) for packs in plan.packs]
    members = tuple(packs for packs in planned for _ in range(rules.copies))
    destinations = [[i for packed in packs for i in packed] for packs in members]
    arrived = iter(_exchange(samples, destinations, index))
    totals = index.totals(chosen, kept)
    groups = [[next(arrived) for _ in packed] for packed in members[dist.get_rank()]]
    packs = [
        pack(
            group,
            aggregation=rules.aggregation,
            totals=totals,
            max_response_len=rules.max_response_len,
            pin_memory=platform.has_accelerator(),
            finish=plan.finish,
            images=images,
        )
        for group in groups
    ]
    num_tokens = sum(index.lengths[i] for i in chosen)
    num_skipped = num_tokens - sum(lengths)
    return StepBatches(packs, plan.fill, plan.imbalance, plan.shared, num_tokens, num_skipped)


def _exchange(samples: Sequence[Sample], destinations: Sequence[Sequence[int]], index: SampleIndex) -> list[Sample]:
    if dist.get_world_size() == 1:
        return [samples[i] for i in destinations[0]]
    from fsdptrain.data.packing.exchange import exchange_samples

    return exchange_samples(samples, destinations, index=index)


def _plan(lengths: Sequence[int], prompts: Sequence[tuple[int, int]], rules: PackingRules) -> PackPlan:
    num_ranks = dist.get_world_size() // rules.copies
    limits = {"num_ranks": num_ranks, "max_tokens": rules.max_tokens}
    plan = rules.features.first(lambda feature: feature.plan_packs(lengths, prompts, **limits))
    if plan is not None:
        return plan
    if rules.layout == "packed":
        return plan_packs(lengths, **limits)
    from fsdptrain.data.packing.padded import plan_rows

    return plan_rows(lengths, **limits)
