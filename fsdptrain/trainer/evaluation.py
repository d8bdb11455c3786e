"""Accuracy on prompts that are never trained on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from fsdptrain.config import Config
from fsdptrain.protocols import RewardFunction, RolloutEngine
from fsdptrain.rewards.scoring import score_completions
from fsdptrain.rollout.evaluate import eval_sampling, evaluate
from fsdptrain.trainer.experience import show
from fsdptrain.types import Metrics, Prompt, SamplingParams


@dataclass(frozen=True)
class Evaluation:
    """The held-out prompts of this rank, and how they are scored."""

    config: Config
    engine: RolloutEngine
    prompts: list[Prompt]
    reward: RewardFunction
    tokenizer: PreTrainedTokenizerBase

    def run(self) -> tuple[Metrics, list[dict[str, Any]]]:
        """Metrics of all ranks, and rows to show. The same draws each time: evaluations differ by the policy only."""
        sampling = eval_sampling(self.config)
        metrics, shown = self._run(sampling, "heldout")
        if self.config.run.eval_greedy:
            greedy, _ = self._run(replace(sampling, num_samples=1, temperature=0.0), "heldout_greedy")
            metrics |= greedy
        return metrics, shown

    def _run(self, sampling: SamplingParams, name: str) -> tuple[Metrics, list[dict[str, Any]]]:
        found = evaluate(
            self.engine,
            self.prompts,
            self._score,
            self._decode,
            sampling=sampling,
            name=name,
            correct_reward=self.config.reward.pass_threshold,
        )
        asked = [prompt for prompt in self.prompts for _ in range(sampling.num_samples)]
        return found.metrics, show(asked, found.responses, found.rewards, self.config.log.num_samples)

    def _score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float | None]:
        return [score.reward for score in score_completions(self.reward, prompts, responses).scores]

    def _decode(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))
