"""Samplers: completions of prompts, scored by the reward."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fsdptrain.data.text import response_text
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import RolloutError
from fsdptrain.rewards.parallel import ParallelReward, RewardResults, compute_rewards
from fsdptrain.rewards.values import RewardResult
from fsdptrain.trainer.phases import Stopwatch
from fsdptrain.types import Completion, Prompt, Sample, SamplingParams

if TYPE_CHECKING:
    from fsdptrain.protocols import RolloutEngine


@dataclass(frozen=True)
class GenerationRound:
    """The samples of one round of generation on this rank."""

    samples: list[Sample]  # whole groups, in prompt order; no advantages yet
    prompts: list[Prompt]  # of each sample
    texts: list[str]  # of each sample, for display
    results: RewardResults  # of each generated sample, including those not kept
    counts: Mapping[str, float] = field(default_factory=dict)  # metrics to sum over ranks and rounds


class Sampler(Protocol):
    """Generate and score samples for prompts."""

    def sample(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, watch: Stopwatch, *, in_flight: bool = False
    ) -> GenerationRound:
        """Generate and score samples. Collective; a rank may have no prompts.

        The group id of a sample is the id of its prompt. `watch` records the time of generation and scoring.
        in_flight: the engine generates in the background. Not collective; from any thread.
        """
        ...


Generate = Callable[[Sequence[Prompt], SamplingParams], list[Completion]]


def generate_with(engine: "RolloutEngine", tokenizer: PreTrainedTokenizerBase, *, in_flight: bool) -> Generate:
    """Return the function that generates, whose completions end at the stop strings with any engine."""
    generate = engine.generate
    if in_flight:
        from fsdptrain.rollout.in_flight import InFlightEngine

        assert isinstance(engine, InFlightEngine)
        generate = engine.generate_in_flight

    def until_stop(prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        completions = generate(prompts, sampling)
        if sampling.stop:
            from fsdptrain.rollout.stop_strings import cut_at_stop

            completions = [cut_at_stop(completion, sampling.stop, tokenizer) for completion in completions]
        return completions

    return until_stop


def rollout_errors(*, in_flight: bool) -> AbstractContextManager[object]:
    """Raise RolloutError on all ranks if one of them fails. In flight, a rank raises its error alone."""
    return nullcontext() if in_flight else raise_on_all_ranks(RolloutError, "rollout")


@dataclass
class SingleTurn:
    """One completion per sample, scored by the reward function."""

    engine: "RolloutEngine"
    reward: ParallelReward
    tokenizer: PreTrainedTokenizerBase

    def sample(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, watch: Stopwatch, *, in_flight: bool = False
    ) -> GenerationRound:
        with rollout_errors(in_flight=in_flight):
            with watch("generate"):
                completions = generate_with(self.engine, self.tokenizer, in_flight=in_flight)(prompts, sampling)
            with watch("reward"):
                asked = [prompt for prompt in prompts for _ in range(sampling.num_samples)]
                texts = [text_of(completion, self.tokenizer, sampling.stop) for completion in completions]
                results = compute_rewards(self.reward, asked, texts)
                samples = [make_sample(*row) for row in zip(asked, completions, results.results, strict=True)]
                return GenerationRound(samples, asked, texts, results)


def text_of(completion: Completion, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> str:
    """Return the response for rewards and environments: with what stopped it if that is one of the texts `stop`."""
    text = response_text(completion.token_ids, tokenizer, stopped=False) if stop else ""
    if any(string in text for string in stop):
        return text
    return response_text(completion.token_ids, tokenizer, stopped=completion.finish_reason == "stop")


def make_sample(prompt: Prompt, completion: Completion, result: RewardResult) -> Sample:
    """Build a sample from the sampled token ids, without decoding and re-encoding."""
    before, after = len(prompt.token_ids), len(completion.token_ids)
    return Sample(
        group_id=prompt.id,
        token_ids=[*prompt.token_ids, *completion.token_ids],
        loss_mask=[False] * before + [True] * after,
        rollout_logprobs=[0.0] * before + list(completion.logprobs),
        reward=result.reward,
        rewards=result.rewards,
        policy_version=completion.policy_version,
        versions=completion.versions and [completion.policy_version] * before + completion.versions,
        truncated=completion.finish_reason == "length",
        routes=_routes(completion, before + after),
    )


def _routes(completion: Completion, length: int) -> Tensor | None:
    if completion.routes is None:
        return None
    from fsdptrain.data.routes import sample_routes

    return sample_routes([completion.routes], length)
