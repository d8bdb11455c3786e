"""Where the samples of a step come from: rollouts that are scored, or the responses of a data set."""

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
from fsdptrain.data.routes import check_routes, sample_routes
from fsdptrain.data.sft import sft_sample
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import RolloutError
from fsdptrain.protocols import InFlightEngine, RewardFunction, RolloutEngine
from fsdptrain.rewards.scoring import Score, Scores, check_unscored, score_completions
from fsdptrain.trainer.samples.selection import Selection, SelectionRules, gather_results, in_stream_order, share
from fsdptrain.trainer.timeline import Stopwatch, Timeline
from fsdptrain.types import Completion, Images, Metrics, Prompt, Sample, SamplingParams

T = TypeVar("T")


@dataclass(frozen=True)
class RolloutBatch:
    """What this rank brings to a step."""

    samples: list[Sample]  # whole groups, in the order of the stream
    shown: list[dict[str, Any]] = field(default_factory=list)  # prompt, response, reward: for people
    scores: Scores | None = None  # None: nothing was to be scored
    num_dropped: int = 0  # samples that no pack can hold
    metrics: Metrics = field(default_factory=dict)  # of all ranks; they win over what is said of `samples`
    seconds: Mapping[str, float] = field(default_factory=dict)  # that its stages took, whenever that was
    images: Mapping[str, Images] = field(default_factory=dict)  # of the prompts of all ranks, by their ids


class SampleSource(Protocol):
    """Every method is collective: an error of one rank is raised on all."""

    @property
    def in_flight(self) -> bool:
        """They are made while the trainer works on something else."""
        ...

    def run_ahead(self, step: int) -> None:
        """Begin what may begin when the engine has the weights of version `step`."""
        ...

    def collect(self, step: int) -> RolloutBatch: ...


@dataclass(frozen=True)
class Round:
    """What one round of generation brought on this rank."""

    samples: list[Sample]  # whole groups, in the order of the prompts; no advantages yet
    prompts: list[Prompt]  # of each sample
    texts: list[str]  # of each sample, for people
    scores: Scores  # of each sample that was made, also of those that are not kept

    def only(self, prompt_ids: Collection[str]) -> "Round":
        """Without the samples of other prompts."""
        kept = [i for i, prompt in enumerate(self.prompts) if prompt.id in prompt_ids]
        return replace(
            self,
            samples=[self.samples[i] for i in kept],
            prompts=[self.prompts[i] for i in kept],
            texts=[self.texts[i] for i in kept],
        )

    def __add__(self, other: "Round") -> "Round":
        return Round(
            samples=[*self.samples, *other.samples],
            prompts=[*self.prompts, *other.prompts],
            texts=[*self.texts, *other.texts],
            scores=self.scores + other.scores,
        )


NOTHING = Round(samples=[], prompts=[], texts=[], scores=Scores([], 0, None))


class Sampler(Protocol):
    """From prompts to scored samples."""

    def make(self, prompts: Sequence[Prompt], sampling: SamplingParams, watch: Stopwatch) -> Round:
        """Collective; a rank may come without prompts. The group of a sample is named by its prompt's id. `watch`
        learns how long it generates and scores."""
        ...

    def make_in_flight(self, prompts: Sequence[Prompt], sampling: SamplingParams, watch: Stopwatch) -> Round:
        """The same with an engine that generates elsewhere, by this rank alone, from any thread."""
        ...


Generate = Callable[[Sequence[Prompt], SamplingParams], list[Completion]]


@dataclass
class SingleTurn:
    """One completion for each sample, scored by the reward function."""

    engine: RolloutEngine
    reward: RewardFunction
    tokenizer: PreTrainedTokenizerBase
    _one_at_a_time: threading.Lock = field(init=False, default_factory=threading.Lock)  # rewards know of no threads

    def make(self, prompts: Sequence[Prompt], sampling: SamplingParams, watch: Stopwatch) -> Round:
        with raise_on_all_ranks(RolloutError, "rollout"):
            return self._make(self.engine.generate, prompts, sampling, watch)

    def make_in_flight(self, prompts: Sequence[Prompt], sampling: SamplingParams, watch: Stopwatch) -> Round:
        assert isinstance(self.engine, InFlightEngine)
        return self._make(self.engine.generate_in_flight, prompts, sampling, watch)

    def _make(self, generate: Generate, prompts: Sequence[Prompt], sampling: SamplingParams, watch: Stopwatch) -> Round:
        with watch("generate"):
            completions = generate(prompts, sampling)
        with self._one_at_a_time, watch("reward"):
            asked = [prompt for prompt in prompts for _ in range(sampling.num_samples)]
            texts = [response_text(self.tokenizer, completion) for completion in completions]
            scored = score_completions(self.reward, asked, texts)
            return Round(
                samples=[make_sample(*row) for row in zip(asked, completions, scored.scores, strict=True)],
                prompts=asked,
                texts=texts,
                scores=scored,
            )


@dataclass(frozen=True)
class PendingRollout:
    """The prompts of one round of a rollout, and what they bring, or will."""

    rollout: int
    prompts: list[Prompt]  # of all ranks
    own: list[Prompt]
    made: "Round | Future[Round]"
    watch: Stopwatch


@dataclass
class RolloutSource:
    """Prompts from a stream, scored samples from a maker: groups that have something to teach, with advantages.

    With `max_staleness` K, rollout r is asked when the engine has the weights of version r - K: by `background` threads
    while the trainer goes on, or at once and kept until its turn. Prompts are drawn, and results recorded, by the main
    thread of all ranks alike.
    """

    stream: PromptStream
    maker: Sampler
    sampling: SamplingParams
    num_prompts: int  # of all ranks together
    num_shown: int
    shaping: ShapingRule
    advantages: AdvantageRule
    max_unscored_fraction: float
    rules: SelectionRules = field(default_factory=SelectionRules)
    max_staleness: int = 0  # versions
    num_rollouts: int | None = None  # of the run: none is asked beyond them
    background: Executor | None = None  # of an engine that generates while the trainer works
    timeline: Timeline = field(default_factory=Timeline)
    _ahead: deque[PendingRollout] = field(
        init=False, default_factory=deque
    )  # first rounds of rollouts to come, in order

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
            if self.sampling.with_routes:
                check_routes(samples)
        return RolloutBatch(
            samples=samples,
            shown=show(made.prompts, made.texts, [sample.reward for sample in made.samples], self.num_shown),
            scores=made.scores,
            seconds=watch.seconds,
            metrics=selection.metrics() | self.stream.metrics(),
            images=images,
        )

    def _ask_until(self, step: int) -> None:
        """Ask all rollouts that may be, when the engine has the weights of version `step`."""
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
        """New prompts, and their samples now or later. Every rank takes part in every round."""
        with raise_on_all_ranks(RolloutError, "rollout"):
            prompts = self.stream.next(num_prompts)
        own, sampling = own_share(prompts), sampling_at(self.sampling, rollout, number)
        if in_flight and self.background is not None:
            made = self.background.submit(self.maker.make_in_flight, own, sampling, watch)
        else:
            made = self.maker.make(own, sampling, watch)
        return PendingRollout(rollout, prompts, own, made, watch)

    def _round(self, asked: PendingRollout, selection: Selection, images: dict[str, Images]) -> Round:
        """The samples of a round, and of these what is kept.

        Images do not travel with samples: every rank asks the stream for all prompts, so it has them.
        """
        made = asked.made
        if not isinstance(made, Round):
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
    """Prompts from a stream, and their labels as responses."""

    stream: PromptStream
    tokenizer: PreTrainedTokenizerBase
    renderer: TurnRenderer
    num_prompts: int  # of all ranks together
    in_flight: bool = False

    def run_ahead(self, step: int) -> None:
        """Nothing: there is no engine to wait for."""

    def collect(self, step: int) -> RolloutBatch:
        del step  # the stream knows where it is
        with raise_on_all_ranks(RolloutError, "--prompt-data"):
            asked = self.stream.next(self.num_prompts)
            for prompt in asked:
                self.stream.record(prompt)
            prompts = own_share(asked)
            samples = [sft_sample(prompt, self.tokenizer, renderer=self.renderer) for prompt in prompts]
            return RolloutBatch(samples, images=images_of(asked))


def images_of(prompts: Sequence[Prompt]) -> dict[str, Images]:
    """By the ids of their prompts."""
    return {prompt.id: prompt.images for prompt in prompts if prompt.images is not None}


def own_share(items: Sequence[T]) -> list[T]:
    """This rank's part of what all ranks hold: contiguous, and as even as it can be."""
    return list(items[share(len(items), dist.get_rank(), dist.get_world_size())])


def sampling_at(sampling: SamplingParams, step: int, number: int = 0) -> SamplingParams:
    """Draws differ between steps, and between the rounds of one: a prompt that comes again is answered anew."""
    return replace(sampling, seed=sampling.seed + 1_000_003 * step + 7_919 * number)


def response_text(tokenizer: PreTrainedTokenizerBase, completion: Completion) -> str:
    """What rewards and environments read: special tokens are left out."""
    return str(tokenizer.decode(completion.token_ids, skip_special_tokens=True))


def make_sample(prompt: Prompt, completion: Completion, score: Score) -> Sample:
    """Token in, token out: what was sampled is what is trained on."""
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
    """A few rows, spread over the rollout, that a person can read."""
    if count == 0:
        return []
    chosen = range(0, len(texts), max(1, len(texts) // count))[:count]
    return [
        {"prompt": prompts[i].text, "response": texts[i], "label": prompts[i].label, "reward": rewards[i]}
        for i in chosen
    ]
