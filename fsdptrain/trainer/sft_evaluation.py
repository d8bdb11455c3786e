"""Evaluation of supervised runs: the loss of held-out rows."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

from fsdptrain.config import Config
from fsdptrain.config.eval_sets import UNNAMED, eval_sets
from fsdptrain.data.packing.pack import drop_overlong
from fsdptrain.data.sft import SampleBuilder
from fsdptrain.distributed import gather, raise_on_all_ranks, sum_over_ranks
from fsdptrain.errors import DataError
from fsdptrain.protocols import TrainBackend
from fsdptrain.trainer.batches import PackingRules, make_batches
from fsdptrain.trainer.data import RunData
from fsdptrain.trainer.samples.sft import Refusals, build_samples
from fsdptrain.trainer.samples.source import images_of, own_share
from fsdptrain.trainer.shown import Shown
from fsdptrain.types import Metrics, Prompt, Sample

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LossEvaluation:
    """Held-out samples of this rank, by evaluation set."""

    backend: TrainBackend
    rules: PackingRules
    samples: Mapping[str, list[Sample]]
    data: RunData

    @classmethod
    def of(cls, config: Config, backend: TrainBackend, *, samples: dict[str, list[Sample]], data: RunData) -> Self:
        """Evaluate `samples` of this rank, without those that a pack cannot hold. Collective."""
        rules = PackingRules.of(config, layout=backend.layout_probe.layout, features=backend.features)
        drop = partial(drop_overlong, max_tokens=rules.max_tokens, overlong_samples=config.batch.overlong_samples)
        with raise_on_all_ranks(DataError, "rows held out for evaluation"):
            samples = {name: drop(own)[0] for name, own in samples.items()}
        return cls(backend, replace(rules, num_steps=1, aggregation="token_mean"), samples, data)

    def run(self) -> tuple[Metrics, list[Shown]]:
        """Return eval/loss, or eval/<name>/loss of a named set: a weighted mean over tokens. No rows. Collective."""
        metrics = Metrics()
        for name, samples in self.samples.items():
            total = count = 0.0
            for step in make_batches(samples, self.rules, rollout=0, images=images_of(self.data.supervised[name])):
                logprobs = self.backend.compute_logprobs(step.packs, "policy")
                for pack, found in zip(step.packs, logprobs, strict=True):
                    weights = pack.loss_weights.double()[pack.loss_mask]  # equal without weights in the data
                    total -= (found.values.double()[pack.loss_mask] * weights).sum().item()
                    count += weights.sum().item()
            total, count = sum_over_ranks([total, count])  # ranks that share packs count each token equally often
            of_set, loss = "" if name == UNNAMED else f"{name}/", total / count
            metrics |= {f"eval/{of_set}loss": loss, f"eval/{of_set}perplexity": math.exp(min(loss, 700.0))}
        return metrics, []


def held_out_samples(config: Config, builder: SampleBuilder, name: str, prompts: list[Prompt]) -> list[Sample]:
    """Build this rank's samples of the rows of a set. Leaves out, with a warning, what cannot be trained on.

    Raises DataError if no row is usable. Collective.
    """
    flag = "--eval-prompt-data" if config.data.eval_prompt_data else "--prompt-data"
    where = f"{flag} {eval_sets(config)[name].data.prompt_data}"
    with raise_on_all_ranks(DataError, where):
        samples, refused = build_samples(builder, own_share(prompts))
    refused = sum(gather(refused), Refusals())
    count = refused.counts.total()
    if count == len(prompts):
        raise refused.none_usable(f"{where}, held out for evaluation")
    if count:
        example = next(iter(refused.examples.values()))
        log.warning("evaluations leave out %d of %d rows, e.g. %s", count, len(prompts), example)
    return samples
