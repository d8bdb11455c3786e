"""Evaluation on held-out prompts."""

from dataclasses import dataclass, replace

from fsdptrain.config import Config
from fsdptrain.distributed import gather
from fsdptrain.rollout.evaluate import eval_sampling, evaluation_metrics
from fsdptrain.trainer.phases import Stopwatch
from fsdptrain.trainer.samples.single_turn import Sampler
from fsdptrain.trainer.shown import Shown, show
from fsdptrain.types import Metrics, Prompt, SamplingParams


@dataclass(frozen=True)
class Evaluation:
    """The held-out prompts of this rank, and the sampler that training uses."""

    config: Config
    sampler: Sampler
    prompts: list[Prompt]

    def run(self) -> tuple[Metrics, list[Shown]]:
        """Return metrics over all ranks, and samples to log.

        Every evaluation uses the same seeds, so results differ only because of the policy.
        """
        sampling = eval_sampling(self.config)
        metrics, shown = self._run(sampling, "heldout")
        if self.config.run.eval_greedy:
            greedy, _ = self._run(replace(sampling, num_samples=1, temperature=0.0), "heldout_greedy")
            metrics |= greedy
        return metrics, shown

    def _run(self, sampling: SamplingParams, name: str) -> tuple[Metrics, list[Shown]]:
        made = self.sampler.sample(self.prompts, sampling, Stopwatch())
        metrics = evaluation_metrics(
            made.samples,
            num_samples=sampling.num_samples,
            name=name,
            correct_reward=self.config.reward.pass_threshold,
        )
        shown = show(made.prompts, made.texts, made.samples, self.config.log.num_samples)
        everywhere = [row for rows in gather(shown) for row in rows]
        return metrics, everywhere[: self.config.log.num_samples]
