"""Where the samples of a step come from: rollouts that are scored, or the responses of a data set."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from fsdptrain.algo.advantages import assign_advantages
from fsdptrain.data.prompts import PromptStream
from fsdptrain.data.routes import check_routes, sample_routes
from fsdptrain.data.sft import sft_sample
from fsdptrain.errors import RolloutError
from fsdptrain.models.collective import together
from fsdptrain.protocols import RewardFunction, RolloutEngine
from fsdptrain.rewards.scoring import Score, Scores, score_completions
from fsdptrain.types import Completion, Prompt, Sample, SamplingParams

T = TypeVar("T")


@dataclass(frozen=True)
class Experience:
    """What this rank brings to a step."""

    samples: list[Sample]  # whole groups, in the order of the stream
    shown: list[dict[str, Any]] = field(default_factory=list)  # prompt, response, reward: for people
    scores: Scores | None = None  # None: nothing was to be scored
    num_dropped: int = 0  # samples that no pack can hold
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
    scores: Scores
    generate_s: float
    reward_s: float


class SampleMaker(Protocol):
    """From prompts to scored samples."""

    def make(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> Round:
        """Collective; a rank may come without prompts."""
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
            texts = self.tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True)
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
    """Prompts from a stream, scored samples from a maker, advantages within groups."""

    stream: PromptStream
    maker: SampleMaker
    sampling: SamplingParams
    num_prompts: int  # of all ranks together
    num_shown: int
    advantage_estimator: str

    def collect(self, step: int) -> Experience:
        with together(RolloutError, "rollout"):
            prompts = own_share(self.stream.next(self.num_prompts))
        made = self.maker.make(prompts, sampling_at(self.sampling, step))
        if self.sampling.with_routes:
            with together(RolloutError, "rollout"):
                check_routes(made.samples)
        return Experience(
            samples=assign_advantages(made.samples, self.advantage_estimator),
            shown=show(made.prompts, made.texts, [score.reward for score in made.scores.scores], self.num_shown),
            scores=made.scores,
            generate_s=made.generate_s,
            reward_s=made.reward_s,
        )


@dataclass
class SftSource:
    """Prompts from a stream, and their labels as responses."""

    stream: PromptStream
    tokenizer: PreTrainedTokenizerBase
    num_prompts: int  # of all ranks together

    def collect(self, step: int) -> Experience:
        del step  # the stream knows where it is
        with together(RolloutError, "--prompt-data"):
            prompts = own_share(self.stream.next(self.num_prompts))
            return Experience([sft_sample(prompt, self.tokenizer) for prompt in prompts])


def own_share(items: Sequence[T]) -> list[T]:
    """This rank's part of what all ranks hold: contiguous, and as even as it can be."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return list(items[len(items) * rank // world_size : len(items) * (rank + 1) // world_size])


def sampling_at(sampling: SamplingParams, step: int) -> SamplingParams:
    """Draws differ between steps, so that a prompt that comes again is answered anew."""
    return replace(sampling, seed=sampling.seed + 1_000_003 * step)


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
