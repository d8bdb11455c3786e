"""Evaluation on held-out prompts, over all ranks: accuracy, pass@k, mean reward and length."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fsdptrain.config import Config
from fsdptrain.config.eval_sets import eval_sets
from fsdptrain.distributed import gather, sum_over_ranks
from fsdptrain.rewards.build import WeightedSum, build_reward
from fsdptrain.rewards.values import is_correct
from fsdptrain.rollout.sampling import sampling_params
from fsdptrain.trainer.phases import Stopwatch
from fsdptrain.trainer.samples.single_turn import Sampler
from fsdptrain.trainer.shown import Shown, show
from fsdptrain.types import Metrics, Prompt, Sample, SamplingParams

_EVAL_SEED = -1  # no rollout of training uses it; all evaluations draw the same numbers


@dataclass(frozen=True)
class Evaluation:
    """The held-out prompts of this rank, by evaluation set, and the sampler that training uses."""

    config: Config
    sampler: Sampler
    prompts: Mapping[str, list[Prompt]]

    def run(self) -> tuple[Metrics, list[Shown]]:
        """Return metrics over all ranks, and samples to log, of all sets.

        Every evaluation uses the same seeds, so results differ only because of the policy.
        """
        sets, metrics, shown = eval_sets(self.config), Metrics(), list[Shown]()
        for name in self.prompts:
            sampling = eval_sampling(sets[name])
            found, rows = self._run(sets[name], name, sampling, "")
            metrics |= found
            shown += rows
            if sets[name].run.eval_greedy:
                greedy = replace(sampling, num_samples=1, temperature=0.0)
                metrics |= self._run(sets[name], name, greedy, "_greedy")[0]
        return metrics, shown

    def _run(self, config: Config, name: str, sampling: SamplingParams, suffix: str) -> tuple[Metrics, list[Shown]]:
        made = self.sampler.sample(self.prompts[name], sampling, Stopwatch())
        threshold, by_row = config.reward.pass_threshold, bool(config.data.reward_key or config.data.environment_key)
        metrics = evaluation_metrics(
            made.samples, num_samples=sampling.num_samples, name=name + suffix, correct_reward=threshold, by_row=by_row
        )
        shown = show(made.prompts, made.texts, made.samples, config.log.num_samples)
        everywhere = [replace(one, row={"set": name, **one.row}) for rows in gather(shown) for one in rows]
        return metrics, everywhere[: config.log.num_samples]


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
    samples: Sequence[Sample], *, num_samples: int, name: str, correct_reward: float = 1.0, by_row: bool = False
) -> Metrics:
    """Compute metrics from the samples of all ranks. Collective.

    samples: of this rank, `num_samples` for each prompt; may be empty. Returns `eval/<name>/...`, means over all
    samples: `accuracy` (share with reward >= `correct_reward`), `reward_mean`, `length_mean` [tokens of the model],
    `truncated` (share that hit a limit), `unscored` (share; counts as reward 0 and wrong), and `pass@k`, a mean over
    prompts, for each power of two up to num_samples. Empty if no rank has a sample. by_row: adds
    `reward_<reward>`, means over the samples that have it.
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
    own = {part for sample in samples for part in sample.rewards if by_row}
    parts = sorted({part for found in gather(own) for part in found})
    of_part = {f"reward_{part}": [s.rewards[part] for s in samples if part in s.rewards] for part in parts}
    sums = {metric: (math.fsum(found), len(found)) for metric, found in of_part.items()}
    sums |= {metric: (total, len(samples)) for metric, total in per_sample.items()}
    sums |= {metric: (total, len(hits)) for metric, total in per_prompt.items()}
    totals, counts = (sum_over_ranks([pair[i] for pair in sums.values()]) for i in (0, 1))
    found = zip(sums, totals, counts, strict=True)
    return {f"eval/{name}/{metric}": total / count for metric, total, count in found if count > 0}


def with_set_rewards(reward: WeightedSum, config: Config, *, has_environment: bool) -> WeightedSum:
    """Add the rewards that --eval-set-options sets for single evaluation sets."""
    parts = [*reward.components]
    for name, each in eval_sets(config).items():
        if each.reward is not config.reward:
            own = build_reward(each.reward, prompt_data=each.data.prompt_data, has_environment=has_environment)
            parts += [replace(part, name=f"{name}.{part.name}", eval_set=name) for part in own.components]
    return replace(reward, components=tuple(parts))


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is correct, if c of n were: 1 - C(n-c, k) / C(n, k).

    Chen et al. 2021, "Evaluating large language models trained on code", equation 1.
    """
    assert 1 <= k <= num_samples
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)
