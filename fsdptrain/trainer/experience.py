"""Where a step's samples come from: rollouts that are scored, or a data set's own responses."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from fsdptrain.algo.advantages import assign_advantages
from fsdptrain.data.prompts import PromptStream
from fsdptrain.data.sft import SftStream
from fsdptrain.protocols import RewardFunction, RolloutEngine
from fsdptrain.rewards.scoring import Score, score_completions
from fsdptrain.types import Completion, Prompt, Sample, SamplingParams


@dataclass(frozen=True)
class Experience:
    """What this rank brings to a step."""

    samples: list[Sample]  # whole groups
    shown: list[Mapping[str, Any]] = field(default_factory=list)  # prompt, response and reward, for people
    unscored: int = 0
    first_error: str | None = None
    generate_s: float = 0.0
    reward_s: float = 0.0


class SampleSource(Protocol):
    def collect(self, step: int) -> Experience: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    @property
    def epoch(self) -> float: ...


@dataclass
class RolloutSource:
    """Prompts from a stream, completions from an engine, rewards from a function, advantages within groups."""

    stream: PromptStream
    engine: RolloutEngine
    reward: RewardFunction
    tokenizer: PreTrainedTokenizerBase
    num_prompts: int  # of all ranks together
    sampling: SamplingParams
    advantage_estimator: str
    num_shown: int

    def collect(self, step: int) -> Experience:
        prompts = own_share(self.stream.next(self.num_prompts))
        start = time.perf_counter()
        completions = self.engine.generate(prompts, self.sampling_at(step))
        generated = time.perf_counter()
        groups = [prompt for prompt in prompts for _ in range(self.sampling.num_samples)]
        texts = self.tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True)
        scored = score_completions(self.reward, groups, texts)
        samples = [make_sample(step, *row) for row in zip(groups, completions, scored.scores, strict=True)]
        return Experience(
            samples=assign_advantages(samples, self.advantage_estimator),
            shown=show(groups, texts, samples, self.num_shown),
            unscored=scored.num_unscored,
            first_error=scored.first_error,
            generate_s=generated - start,
            reward_s=time.perf_counter() - generated,
        )

    def sampling_at(self, step: int) -> SamplingParams:
        """A prompt that comes again in a later step is not answered by the same draws."""
        from dataclasses import replace

        return replace(self.sampling, seed=self.sampling.seed + 1_000_003 * step)

    def state_dict(self) -> dict[str, Any]:
        return self.stream.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stream.load_state_dict(state)

    @property
    def epoch(self) -> float:
        return self.stream.epoch
