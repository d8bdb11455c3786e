"""Source of training samples: rollouts, possibly ahead of training, with selected groups and advantages."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch.distributed as dist

from fsdptrain.algo.advantages import AdvantageRule, assign_advantages
from fsdptrain.data.stream import PromptSource
from fsdptrain.distributed import gather, raise_on_all_ranks
from fsdptrain.errors import RolloutError
from fsdptrain.rewards.results import RewardResults, check_failed_rewards
from fsdptrain.trainer.phases import Stopwatch
from fsdptrain.trainer.samples.selection import Selection, SelectionRules, gather_results, share
from fsdptrain.trainer.samples.single_turn import NOTHING, GenerationRound, Sampler
from fsdptrain.trainer.shown import Shown, show
from fsdptrain.types import Images, Metrics, Prompt, Sample, SamplingParams

if TYPE_CHECKING:
    from fsdptrain.algo.shaping import ShapingRule

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


class SampleSource(Protocol):
    """Source of training samples. Every method is collective: if one rank fails, all ranks raise."""

    @property
    def in_flight(self) -> bool:
        """Whether rollouts are generated in the background while the trainer works."""
        ...

    def run_ahead(self, step: int) -> None:
        """Start the rollouts that are allowed once the engine has the weights of version `step`."""
        ...

    def collect(self, step: int) -> RolloutBatch: ...


@dataclass
class GroupSource:
    """Base of the sources that draw prompts from a stream, sample and score them, and compute advantages.

    The main thread draws prompts and records results, identically on all ranks.
    """

    stream: PromptSource
    sampler: Sampler
    sampling: SamplingParams
    num_prompts: int  # of a rollout, of all ranks
    num_shown: int
    shaping: "ShapingRule | None"
    advantages: AdvantageRule
    max_unscored_fraction: float
    rules: SelectionRules = field(default_factory=SelectionRules)
    max_staleness: int = 0  # versions
    num_rollouts: int | None = None  # of the run: no rollouts are started beyond it

    def last_allowed(self, step: int) -> int:
        """Return the number of the last rollout that may start when the engine has the weights of version `step`."""
        last = step + self.max_staleness
        return last if self.num_rollouts is None else min(last, max(step, self.num_rollouts - 1))

    def draw(self, num_prompts: int) -> list[Prompt]:
        """Draw the next prompts, of all ranks. Collective."""
        with raise_on_all_ranks(RolloutError, "rollout"):
            return self.stream.next(num_prompts)

    def check_rewards(self, results: RewardResults) -> None:
        """Raise RewardError on all ranks if too many samples are unscored. Collective."""
        check_failed_rewards(results, max_unscored_fraction=self.max_unscored_fraction)

    def batch(
        self,
        samples: Sequence[Sample],
        made: GenerationRound,
        *,
        images: Mapping[str, Images],
        seconds: Mapping[str, float],
        metrics: Metrics,
    ) -> RolloutBatch:
        """Shape rewards and compute the advantages of `samples`, whole groups. `made` is shown. Collective."""
        with raise_on_all_ranks(RolloutError, "rollout"):
            shaped = list(samples) if self.shaping is None else self.shaping.apply(samples)
            samples = assign_advantages(shaped, self.advantages)
            if self.sampling.with_routes:
                from fsdptrain.data.routes import check_routes

                check_routes([s for sample in samples for s in sample.sequences])
        return RolloutBatch(
            samples=samples,
            shown=show(made.prompts, made.texts, made.samples, self.num_shown),
            results=made.results,
            seconds=seconds,
            metrics=metrics | self.stream.metrics() | summed(made.counts),
            images=images,
        )


@dataclass(frozen=True)
class PendingRollout:
    """One round of a rollout that was generated ahead of training."""

    rollout: int
    prompts: list[Prompt]  # of all ranks
    own: list[Prompt]
    made: GenerationRound
    watch: Stopwatch


@dataclass
class RolloutSource(GroupSource):
    """Generates whole rollouts on the training thread.

    With `max_staleness` K, rollout r is generated with the weights of version r - K and kept until its turn.
    """

    _ahead: deque[PendingRollout] = field(
        init=False, default_factory=deque
    )  # first rounds of future rollouts, in order

    @property
    def in_flight(self) -> bool:
        return False

    def run_ahead(self, step: int) -> None:
        """The engine generates only while the trainer waits for it."""

    def collect(self, step: int) -> RolloutBatch:
        self._generate_until(step)
        pending = self._ahead.popleft()
        assert pending.rollout == step
        watch, images, made = pending.watch, {}, NOTHING
        selection = Selection(self.rules, wanted=self.num_prompts)
        while selection.needs_round:
            if selection.rounds:
                pending = self._generate(step, selection.num_to_sample, selection.rounds, watch)
            made += self._select(pending, selection, images)
            self.check_rewards(made.results)
        selection.check(step)
        samples = made.samples
        if selection.rounds > 1:
            from fsdptrain.trainer.samples.stream_order import in_stream_order

            samples = in_stream_order(samples, selection.kept)
        return self.batch(samples, made, images=images, seconds=watch.seconds, metrics=selection.metrics())

    def _generate_until(self, step: int) -> None:
        """Generate all rollouts that are allowed when the engine has the weights of version `step`."""
        first = self._ahead[-1].rollout + 1 if self._ahead else step
        for rollout in range(first, self.last_allowed(step) + 1):
            self._ahead.append(self._generate(rollout, self.num_prompts, 0, Stopwatch()))

    def _generate(self, rollout: int, num_prompts: int, number: int, watch: Stopwatch) -> PendingRollout:
        """Draw new prompts and generate their samples. Every rank takes part in every round."""
        prompts = self.draw(num_prompts)
        own = own_share(prompts)
        made = self.sampler.sample(own, sampling_at(self.sampling, rollout, number), watch)
        return PendingRollout(rollout, prompts, own, made, watch)

    def _select(self, pending: PendingRollout, selection: Selection, images: dict[str, Images]) -> GenerationRound:
        """Return the samples of a round that are kept.

        Images are not sent with samples: every rank draws all prompts from the stream and so has all images.
        """
        images |= images_of(pending.prompts)
        groups = gather_results(pending.own, pending.made.samples)
        for prompt in pending.prompts:
            self.stream.record(prompt)
        chosen = selection.add(groups)
        return pending.made.only({prompt.id for prompt, kept in zip(pending.prompts, chosen, strict=True) if kept})


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
    return list(items[share(len(items), dist.get_rank(), dist.get_world_size())])


def sampling_at(sampling: SamplingParams, step: int, number: int = 0) -> SamplingParams:
    """Derive the seed of a round. Seeds differ between rollouts and rounds, so a repeated prompt gets new responses."""
    return replace(sampling, seed=sampling.seed + 1_000_003 * step + 7_919 * number)
