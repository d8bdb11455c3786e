"""Evaluation on held-out prompts, over all ranks: accuracy, pass@k, mean reward and length."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fsdptrain.config import Config
from fsdptrain.distributed import gather, sum_over_ranks
from fsdptrain.rewards.values import is_correct
from fsdptrain.rollout.sampling import sampling_params
from fsdptrain.trainer.phases import Stopwatch
from fsdptrain.trainer.samples.single_turn import Sampler
from fsdptrain.trainer.shown import Shown, show
from fsdptrain.types import Metrics, Prompt, Sample, SamplingParams

_EVAL_SEED = -1  # no rollout of training uses it; all evaluations draw the same numbers


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
            made.samples, num_samples=sampling.num_samples, name=name, correct_reward=self.config.reward.pass_threshold
        )
        shown = show(made.prompts, made.texts, made.samples, self.config.log.num_samples)
        everywhere = [row for rows in gather(shown) for row in rows]
        return metrics, everywhere[: self.config.log.num_samples]


def eval_sampling(config: Config) -> SamplingParams:
    """The sampling parameters of every evaluation of a run."""
    return sampling_params(
        config,
        num_samples=config.run.n_samples_per_eval_prompt,
        temperature=config.run.eval_temperature,
        seed=config.rollout.seed + _EVAL_SEED,
        top_p=1.0,
        top_k=-1,
        min_p=0.0,
    )


def evaluation_metrics(
    samples: Sequence[Sample], *, num_samples: int, name: str, correct_reward: float = 1.0
) -> Metrics:
    """Compute metrics from the samples of all ranks. Collective.

    samples: of this rank, `num_samples` for each prompt; may be empty. Returns `eval/<name>/...`, means over all
    samples: `accuracy` (share with reward >= `correct_reward`), `reward_mean`, `length_mean` [tokens of the model],
    `truncated` (share that hit a limit), `unscored` (share; counts as reward 0 and wrong), and `pass@k`, a mean over
    prompts, for each power of two up to num_samples. Empty if no rank has a sample.
    """
    rewards = [sample.reward for sample in samples]
    correct = [is_correct(reward, correct_reward) for reward in rewards]

    ks = [2**i for i in range(num_samples.bit_length())]
    hits = [sum(correct[start : start + num_samples]) for start in range(0, len(correct), num_samples)]
    per_sample = {
        "accuracy": sum(correct),
        "reward_mean": math.fsum(reward for reward in rewards if reward is not None),
        "length_mean": sum(sample.num_generated for sample in samples),
        "truncated": sum(sample.is_cut for sample in samples),
        "unscored": sum(reward is None for reward in rewards),
    }
    per_prompt = {f"pass@{k}": math.fsum(pass_at_k(num_samples, c, k) for c in hits) for k in ks}
    sums = sum_over_ranks([len(samples), len(hits), *per_sample.values(), *per_prompt.values()])
    counts = [sums[0]] * len(per_sample) + [sums[1]] * len(per_prompt)
    return {
        f"eval/{name}/{metric}": total / count
        for metric, total, count in zip([*per_sample, *per_prompt], sums[2:], counts, strict=True)
        if count > 0
    }


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is correct, if c of n were: 1 - C(n-c, k) / C(n, k).

    Chen et al. 2021, "Evaluating large language models trained on code", equation 1.
    """
    assert 1 <= k <= num_samples
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)
