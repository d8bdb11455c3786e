"""Sample sources: generated and scored rollouts, or the labels of a dataset (SFT)."""

import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from fsdptrain.algo.advantages import AdvantageRule, assign_advantages
from fsdptrain.algo.shaping import ShapingRule, shape
from fsdptrain.data.chat import TurnRenderer
from fsdptrain.data.prompts import PromptStream
from fsdptrain.data.routes import sample_routes
from fsdptrain.data.sft import sft_sample
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import RolloutError
from fsdptrain.feature import NO_FEATURES, Features
from fsdptrain.protocols import InFlightEngine, RewardFunction, RolloutEngine
from fsdptrain.rewards.scoring import Score, Scores, check_unscored, score_completions
from fsdptrain.trainer.samples.selection import Selection, SelectionRules, gather_results, in_stream_order, share
from fsdptrain.trainer.timeline import Stopwatch, Timeline
from fsdptrain.types import Completion, Images, Metrics, Prompt, Sample, SamplingParams

T = TypeVar("T")


@dataclass(frozen=True)
class RolloutBatch:
    """The samples of one rollout on this rank."""

    samples: list[Sample]  # whole groups, in stream order
    shown: list[dict[str, Any]] = field(default_factory=list)  # rows for display: prompt, response, reward
    scores: Scores | None = None  # None: nothing to score
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


@dataclass(frozen=True)
class GenerationRound:
    """The samples of one round of generation on this rank."""

    samples: list[Sample]  # whole groups, in prompt order; no advantages yet
    prompts: list[Prompt]  # of each sample
    texts: list[str]  # of each sample, for display
    scores: Scores  # of each generated sample, including those not kept

    def only(self, prompt_ids: Collection[str]) -> "GenerationRound":
        """Keep only the samples of the given prompts."""
        kept = [i for i, prompt in enumerate(self.prompts) if prompt.id in prompt_ids]
        return replace(
            self,
            samples=[self.samples[i] for i in kept],
            prompts=[self.prompts[i] for i in kept],
            texts=[self.texts[i] for i in kept],
        )

    def __add__(self, other: "GenerationRound") -> "GenerationRound":
        return GenerationRound(
            samples=[*self.samples, *other.samples],
            prompts=[*self.prompts, *other.prompts],
            texts=[*self.texts, *other.texts],
            scores=self.scores + other.scores,
        )


NOTHING = GenerationRound(samples=[], prompts=[], texts=[], scores=Scores([], 0, None))


class Sampler(Protocol):
    """Generate and score samples for prompts."""

    def sample(self, prompts: Sequence[Prompt], sampling: SamplingParams, watch: Stopwatch) -> GenerationRound:
        """Generate and score samples. Collective; a rank may have no prompts.

        The group id of a sample is the id of its prompt. `watch` records the time of generation and scoring.
        """
        ...

    def sample_in_flight(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, watch: Stopwatch
    ) -> GenerationRound:
        """Same as `sample`, for an engine that generates in the background. Not collective; call it from any thread."""
        ...


Generate = Callable[[Sequence[Prompt], SamplingParams], list[Completion]]


@dataclass
class SingleTurn:
    """One completion per sample, scored by the reward function."""

    engine: RolloutEngine
    reward: RewardFunction
    tokenizer: PreTrainedTokenizerBase
    _one_at_a_time: threading.Lock = field(init=False, default_factory=threading.Lock)  # rewards may not be thread-safe

    def sample(self, prompts: Sequence[Prompt], sampling: SamplingParams, watch: Stopwatch) -> GenerationRound:
        with raise_on_all_ranks(RolloutError, "rollout"):
            return self._sample(self.engine.generate, prompts, sampling, watch)

    def sample_in_flight(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, watch: Stopwatch
    ) -> GenerationRound:
        assert isinstance(self.engine, InFlightEngine)
        return self._sample(self.engine.generate_in_flight, prompts, sampling, watch)

    def _sample(
        self, generate: Generate, prompts: Sequence[Prompt], sampling: SamplingParams, watch: Stopwatch
    ) -> GenerationRound:
        with watch("generate"):
            completions = generate(prompts, sampling)
        with self._one_at_a_time, watch("reward"):
            asked = [prompt for prompt in prompts for _ in range(sampling.num_samples)]
            texts = [response_text(self.tokenizer, completion) for completion in completions]
            scored = score_completions(self.reward, asked, texts)
            return GenerationRound(
                samples=[make_sample(*row) for row in zip(asked, completions, scored.scores, strict=True)],
                prompts=asked,
                texts=texts,
                scores=scored,
            )


@dataclass(frozen=True)
class PendingRollout:
    """The prompts of one round of a rollout, and their samples or the future of them."""

    rollout: int
    prompts: list[Prompt]  # of all ranks
    own: list[Prompt]
    made: "GenerationRound | Future[GenerationRound]"
    watch: Stopwatch


@dataclass
class RolloutSource:
    """Draws prompts from a stream, samples and scores them, selects groups, and computes advantages.

    With `max_staleness` K, rollout r starts when the engine has the weights of version r - K. It runs on `background`
    threads while the trainer continues, or runs immediately and is kept until its turn. The main thread draws prompts
    and records results, identically on all ranks.
    """

    stream: PromptStream
    sampler: Sampler
    sampling: SamplingParams
    num_prompts: int  # of all ranks
    num_shown: int
    shaping: ShapingRule
    advantages: AdvantageRule
    max_unscored_fraction: float
    rules: SelectionRules = field(default_factory=SelectionRules)
    max_staleness: int = 0  # versions
    num_rollouts: int | None = None  # of the run: no rollouts are started beyond it
    background: Executor | None = None  # for engines that generate while the trainer works
    timeline: Timeline = field(default_factory=Timeline)
    features: Features = NO_FEATURES
    _ahead: deque[PendingRollout] = field(
        init=False, default_factory=deque
    )  # first rounds of future rollouts, in order

    @property
    def in_flight(self) -> bool:
        return self.background is not None

    def run_ahead(self, step: int) -> None:
        if self.in_flight:
            self._ask_until(step)

    def collect(self, step: int) -> RolloutBatch:
        self._ask_until(step)
        asked = self._ahead.popleft()
        assert asked.rollout == step
        watch, images, made = asked.watch, {}, NOTHING
        selection = Selection(self.rules, wanted=self.num_prompts)
        while selection.goes_on:
            if selection.rounds:
                asked = self._ask(step, selection.num_to_ask, selection.rounds, watch)
            made += self._round(asked, selection, images)
            check_unscored(made.scores, max_unscored_fraction=self.max_unscored_fraction)
        selection.check(step)
        samples = made.samples if selection.rounds == 1 else in_stream_order(made.samples, selection.kept)
        with raise_on_all_ranks(RolloutError, "rollout"):
            samples = assign_advantages(shape(samples, self.shaping), self.advantages)
            for feature in self.features:
                feature.check_samples(samples)
        return RolloutBatch(
            samples=samples,
            shown=show(made.prompts, made.texts, [sample.reward for sample in made.samples], self.num_shown),
            scores=made.scores,
            seconds=watch.seconds,
            metrics=selection.metrics() | self.stream.metrics(),
            images=images,
        )

    def _ask_until(self, step: int) -> None:
        """Start all rollouts that are allowed when the engine has the weights of version `step`."""
        last = step + self.max_staleness
        if self.num_rollouts is not None:
            last = min(last, max(step, self.num_rollouts - 1))
        first = self._ahead[-1].rollout + 1 if self._ahead else step
        for rollout in range(first, last + 1):
            watch = Stopwatch(self.timeline, rollout + 1)
            self._ahead.append(self._ask(rollout, self.num_prompts, 0, watch, in_flight=self.in_flight))

    def _ask(
        self, rollout: int, num_prompts: int, number: int, watch: Stopwatch, *, in_flight: bool = False
    ) -> PendingRollout:
        """Draw new prompts and start generating their samples. Every rank takes part in every round."""
        with raise_on_all_ranks(RolloutError, "rollout"):
            prompts = self.stream.next(num_prompts)
        own, sampling = own_share(prompts), sampling_at(self.sampling, rollout, number)
        if in_flight and self.background is not None:
            made = self.background.submit(self.sampler.sample_in_flight, own, sampling, watch)
        else:
            made = self.sampler.sample(own, sampling, watch)
        return PendingRollout(rollout, prompts, own, made, watch)

    def _round(self, asked: PendingRollout, selection: Selection, images: dict[str, Images]) -> GenerationRound:
        """Wait for the samples of a round and return those that are kept.

        Images are not sent with samples: every rank draws all prompts from the stream and so has all images.
        """
        made = asked.made
        if not isinstance(made, GenerationRound):
            with raise_on_all_ranks(RolloutError, "rollout"):
                made = made.result()
        images |= images_of(asked.prompts)
        groups = gather_results(asked.own, made.samples, self.rules)
        for prompt, group in zip(asked.prompts, groups, strict=True):
            self.stream.record(prompt, passed=group.num_passed, tried=group.num_scored)
        chosen = selection.add(groups)
        return made.only({prompt.id for prompt, kept in zip(asked.prompts, chosen, strict=True) if kept})


@dataclass
class SftSource:
    """Draws prompts from a stream, and uses their labels as responses."""

    stream: PromptStream
    tokenizer: PreTrainedTokenizerBase
    renderer: TurnRenderer
    num_prompts: int  # of all ranks
    in_flight: bool = False

    def run_ahead(self, step: int) -> None:
        """Do nothing: SFT has no engine."""

    def collect(self, step: int) -> RolloutBatch:
        del step  # the stream tracks its position
        with raise_on_all_ranks(RolloutError, "--prompt-data"):
            asked = self.stream.next(self.num_prompts)
            for prompt in asked:
                self.stream.record(prompt)
            prompts = own_share(asked)
            samples = [sft_sample(prompt, self.tokenizer, renderer=self.renderer) for prompt in prompts]
            return RolloutBatch(samples, images=images_of(asked))


def images_of(prompts: Sequence[Prompt]) -> dict[str, Images]:
    """Map prompt ids to images."""
    return {prompt.id: prompt.images for prompt in prompts if prompt.images is not None}


def own_share(items: Sequence[T]) -> list[T]:
    """Return this rank's contiguous share of `items`, which all ranks hold. Shares differ by at most one item."""
    return list(items[share(len(items), dist.get_rank(), dist.get_world_size())])


def sampling_at(sampling: SamplingParams, step: int, number: int = 0) -> SamplingParams:
    """Derive the seed of a round. Seeds differ between rollouts and rounds, so a repeated prompt gets new responses."""
    return replace(sampling, seed=sampling.seed + 1_000_003 * step + 7_919 * number)


def response_text(tokenizer: PreTrainedTokenizerBase, completion: Completion) -> str:
    """Decode the response for rewards and environments, without special tokens."""
    return str(tokenizer.decode(completion.token_ids, skip_special_tokens=True))


def make_sample(prompt: Prompt, completion: Completion, score: Score) -> Sample:
    """Build a sample from the sampled token ids, without decoding and re-encoding."""
    before, after = len(prompt.token_ids), len(completion.token_ids)
    return Sample(
        group_id=prompt.id,
        token_ids=[*prompt.token_ids, *completion.token_ids],
        loss_mask=[False] * before + [True] * after,
        rollout_logprobs=[0.0] * before + list(completion.logprobs),
        reward=score.reward,
        rewards=score.rewards,
        policy_version=completion.policy_version,
        versions=completion.versions and [completion.policy_version] * before + completion.versions,
        truncated=completion.finish_reason == "length",
        routes=sample_routes([completion.routes], before + after),
    )


def show(
    prompts: Sequence[Prompt], texts: Sequence[str], rewards: Sequence[float | None], count: int
) -> list[dict[str, Any]]:
    """Select up to `count` rows for display, spread over the rollout."""
    if count == 0:
        return []
    chosen = range(0, len(texts), max(1, len(texts) // count))[:count]
    return [
        {"prompt": prompts[i].text, "response": texts[i], "label": prompts[i].label, "reward": rewards[i]}
        for i in chosen
    ]
