"""Where the samples of a step come from: rollouts that are scored, or the responses of a data set."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from fsdptrain.algo.advantages import AdvantageRule, assign_advantages
from fsdptrain.algo.shaping import ShapingRule, shape
from fsdptrain.data.prompts import PromptStream
from fsdptrain.data.routes import check_routes, sample_routes
from fsdptrain.data.sft import sft_sample
from fsdptrain.data.turns import TurnRenderer
from fsdptrain.errors import RolloutError
from fsdptrain.models.collective import together
from fsdptrain.protocols import RewardFunction, RolloutEngine
from fsdptrain.rewards.scoring import Score, Scores, check_unscored, score_completions
from fsdptrain.trainer.selection import Selection, SelectionRules, gather_results, in_stream_order, share
from fsdptrain.types import Completion, Metrics, Prompt, Sample, SamplingParams

T = TypeVar("T")


@dataclass(frozen=True)
class Experience:
    """What this rank brings to a step."""

    samples: list[Sample]  # whole groups, in the order of the stream
    shown: list[dict[str, Any]] = field(default_factory=list)  # prompt, response, reward: for people
    scores: Scores | None = None  # None: nothing was to be scored
    num_dropped: int = 0  # samples that no pack can hold
    metrics: Metrics = field(default_factory=dict)  # of all ranks; they win over what is said of `samples`
    generate_s: float = 0.0
    reward_s: float = 0.0


class SampleSource(Protocol):
    """Every method is collective: an error of one rank is raised on all."""

    def collect(self, step: int) -> Experience: ...


@dataclass(frozen=True)
class Round:
    """What one round of generation brought on this rank."""

    samples: list[Sample]  # whole groups, in the order of the prompts; no advantages yet
    prompts: list[Prompt]  # of each sample
    texts: list[str]  # of each sample, for people
    scores: Scores  # of each sample that was made, also of those that are not kept
    generate_s: float
    reward_s: float

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
            generate_s=self.generate_s + other.generate_s,
            reward_s=self.reward_s + other.reward_s,
        )


NOTHING = Round(samples=[], prompts=[], texts=[], scores=Scores([], 0, None), generate_s=0.0, reward_s=0.0)


class SampleMaker(Protocol):
    """From prompts to scored samples."""

    def make(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> Round:
        """Collective; a rank may come without prompts. The group of a sample is named by its prompt's id."""
        ...


@dataclass
class SingleTurn:
    """One completion for each sample, scored by the reward function."""

    engine: RolloutEngine
    reward: RewardFunction
    tokenizer: PreTrainedTokenizerBase

    def make(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> Round:
        with together(RolloutError, "rollout"):
            start = time.perf_counter()
            completions = self.engine.generate(prompts, sampling)
            generated = time.perf_counter()
            asked = [prompt for prompt in prompts for _ in range(sampling.num_samples)]
            texts = [response_text(self.tokenizer, completion) for completion in completions]
            scored = score_completions(self.reward, asked, texts)
            return Round(
                samples=[make_sample(*row) for row in zip(asked, completions, scored.scores, strict=True)],
                prompts=asked,
                texts=texts,
                scores=scored,
                generate_s=generated - start,
                reward_s=time.perf_counter() - generated,
            )


@dataclass
class RolloutSource:
    """Prompts from a stream, scored samples from a maker: groups that have something to teach, with advantages."""

    stream: PromptStream
    maker: SampleMaker
    sampling: SamplingParams
    num_prompts: int  # of all ranks together
    num_shown: int
    shaping: ShapingRule
    advantages: AdvantageRule
    max_unscored_fraction: float
    rules: SelectionRules = field(default_factory=SelectionRules)

    def collect(self, step: int) -> Experience:
        selection = Selection(self.rules, wanted=self.num_prompts)
        made = NOTHING
        while selection.goes_on:
            made += self._round(step, selection)
            check_unscored(made.scores, max_unscored_fraction=self.max_unscored_fraction)
        selection.check(step)
        samples = made.samples if selection.rounds == 1 else in_stream_order(made.samples, selection.kept)
        with together(RolloutError, "rollout"):
            samples = assign_advantages(shape(samples, self.shaping), self.advantages)
            if self.sampling.with_routes:
                check_routes(samples)
        return Experience(
            samples=samples,
            shown=show(made.prompts, made.texts, [sample.reward for sample in made.samples], self.num_shown),
            scores=made.scores,
            generate_s=made.generate_s,
            reward_s=made.reward_s,
            metrics=selection.metrics() | self.stream.metrics(),
        )

    def _round(self, step: int, selection: Selection) -> Round:
        """New prompts, their samples, and of these what is kept. Every rank takes part in every round."""
        with together(RolloutError, "rollout"):
            asked = self.stream.next(selection.num_to_ask)
        own = own_share(asked)
        made = self.maker.make(own, sampling_at(self.sampling, step, selection.rounds))
        groups = gather_results(own, made.samples, self.rules)
        for prompt, group in zip(asked, groups, strict=True):
            self.stream.record(prompt, passed=group.num_passed, tried=group.num_scored)
        chosen = selection.add(groups)
        return made.only({prompt.id for prompt, kept in zip(asked, chosen, strict=True) if kept})


@dataclass
class SftSource:
    """Prompts from a stream, and their labels as responses."""

    stream: PromptStream
    tokenizer: PreTrainedTokenizerBase
    renderer: TurnRenderer
    num_prompts: int  # of all ranks together

    def collect(self, step: int) -> Experience:
        del step  # the stream knows where it is
        with together(RolloutError, "--prompt-data"):
            prompts = own_share(self.stream.next(self.num_prompts))
            return Experience([sft_sample(prompt, self.tokenizer, renderer=self.renderer) for prompt in prompts])


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
