"""Source of training samples: rollouts, possibly ahead of training, with selected groups and advantages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist

from fsdptrain.algo.advantages import AdvantageRule, assign_advantages
from fsdptrain.data.prompts import PromptStream
from fsdptrain.distributed import gather, raise_on_all_ranks
from fsdptrain.errors import RolloutError
from fsdptrain.rewards.parallel import RewardResults, check_failed_rewards
from fsdptrain.trainer.phases import Stopwatch
from fsdptrain.trainer.samples.single_turn import GenerationRound, Sampler
from fsdptrain.trainer.shown import Shown, show
from fsdptrain.types import Images, Metrics, Prompt, Sample, SamplingParams

if TYPE_CHECKING:
    from fsdptrain.algo.shaping import ShapingRule
    from fsdptrain.trainer.samples.selection import SelectionRules

T = TypeVar("T")


@dataclass(frozen=True)
class RolloutBatch:
    """The samples of one rollout on this rank."""

    samples: list[Sample]  # whole groups, in stream order
    shown: list[Shown] = field(default_factory=list)  # samples to log; those of rank 0 are
    results: RewardResults | None = None  # None: nothing to score
    num_dropped: int = 0  # samples too long for a pack
    metrics: Metrics = field(default_factory=dict)  # over all ranks; they override the metrics computed from `samples`
    seconds: Mapping[str, float] = field(default_factory=dict)  # per stage, including work done ahead of time
    images: Mapping[str, Images] = field(default_factory=dict)  # of the prompts of all ranks, by prompt id


@dataclass
class RolloutSource:
    """Draws prompts from a stream, samples and scores them on the training thread, and computes advantages.

    The main thread draws prompts and records results, identically on all ranks. Every method is collective: if one rank
    fails, all ranks raise.
    """

    stream: PromptStream
    sampler: Sampler
    sampling: SamplingParams
    num_prompts: int  # of a rollout, of all ranks
    num_shown: int
    shaping: "ShapingRule | None"
    advantages: AdvantageRule
    max_unscored_fraction: float
    rules: "SelectionRules | None" = None  # of dynamic sampling; None: all groups are trained

    @property
    def in_flight(self) -> bool:
        """Whether rollouts are generated in the background while the trainer works."""
        return False

    def run_ahead(self, step: int) -> None:
        """Do nothing: the engine generates only while the trainer waits for it."""

    def collect(self, step: int) -> RolloutBatch:
        watch, images, metrics = Stopwatch(), dict[str, Images](), Metrics()
        if self.rules is None:
            _, generated = self.generate(self.num_prompts, sampling_at(self.sampling, step), watch, images)
            self.check_rewards(generated.results)
        else:
            from fsdptrain.trainer.samples.selection import select_groups

            generated, metrics = select_groups(self, self.rules, step, watch, images)
        return self.batch(generated, images=images, seconds=watch.seconds, metrics=metrics)

    def generate(
        self, num_prompts: int, sampling: SamplingParams, watch: Stopwatch, images: dict[str, Images]
    ) -> tuple[list[Prompt], GenerationRound]:
        """Draw prompts, of all ranks, and generate for those of this rank. Adds the images of all. Collective."""
        prompts = self.draw(num_prompts)
        generated = self.sampler.sample(own_share(prompts), sampling, watch)
        images |= images_of(prompts)  # they are not sent with samples: every rank has those of all prompts
        for prompt in prompts:
            self.stream.record(prompt)
        return prompts, generated

    def draw(self, num_prompts: int) -> list[Prompt]:
        """Draw the next prompts, of all ranks. Collective."""
        with raise_on_all_ranks(RolloutError, "rollout"):
            return self.stream.next(num_prompts)

    def check_rewards(self, results: RewardResults) -> None:
        """Raise RewardError on all ranks if too many samples are unscored. Collective."""
        check_failed_rewards(results, max_unscored_fraction=self.max_unscored_fraction)

    def batch(
        self,
        generated: GenerationRound,
        *,
        images: Mapping[str, Images],
        seconds: Mapping[str, float],
        metrics: Metrics,
    ) -> RolloutBatch:
        """Shape rewards and compute advantages of whole groups. Collective."""
        with raise_on_all_ranks(RolloutError, "rollout"):
            shaped = generated.samples if self.shaping is None else self.shaping.apply(generated.samples)
            samples = assign_advantages(shaped, self.advantages)
            if self.sampling.with_routes:
                from fsdptrain.data.routes import check_routes

                check_routes([s for sample in samples for s in sample.sequences])
        return RolloutBatch(
            samples=samples,
            shown=show(generated.prompts, generated.texts, generated.samples, self.num_shown),
            results=generated.results,
            seconds=seconds,
            metrics=metrics | summed(generated.counts),
            images=images,
        )


def summed(counts: Mapping[str, float]) -> Metrics:
    """Sum by name over all ranks. A rank without groups has none. Collective."""
    total: Metrics = {}
    for found in gather(dict(counts)):
        total |= {name: total.get(name, 0.0) + count for name, count in found.items()}
    return total


def images_of(prompts: Sequence[Prompt]) -> dict[str, Images]:
    """Map prompt ids to images."""
    return {prompt.id: prompt.images for prompt in prompts if prompt.images is not None}


def own_share(items: Sequence[T]) -> list[T]:
    """Return this rank's contiguous share of `items`, which all ranks hold. Shares differ by at most one item."""
    count, rank, world_size = len(items), dist.get_rank(), dist.get_world_size()
    return list(items[count * rank // world_size : count * (rank + 1) // world_size])


def sampling_at(sampling: SamplingParams, step: int, number: int = 0) -> SamplingParams:
    """Derive the seed of a round. Seeds differ between rollouts and rounds, so a repeated prompt gets new responses."""
    return replace(sampling, seed=sampling.seed + 1_000_003 * step + 7_919 * number)
