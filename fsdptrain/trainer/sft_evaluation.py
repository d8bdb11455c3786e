"""Evaluation of supervised runs: the loss of held-out rows."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fsdptrain.config import Config
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
from fsdptrain.types import Images, Metrics, Sample

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LossEvaluation:
    """Held-out samples of this rank."""

    backend: TrainBackend
    rules: PackingRules
    samples: list[Sample]
    images: Mapping[str, Images]

    @classmethod
    def of(cls, config: Config, backend: TrainBackend, *, samples: list[Sample], data: RunData) -> "LossEvaluation":
        """Evaluate `samples` of this rank, without those that a pack cannot hold. Collective."""
        rules = PackingRules.of(config, layout=backend.layout_probe.layout, features=backend.features)
        overlong = config.batch.overlong_samples
        with raise_on_all_ranks(DataError, "rows held out for evaluation"):
            samples, _ = drop_overlong(samples, max_tokens=rules.max_tokens, overlong_samples=overlong)
        return cls(backend, replace(rules, num_steps=1), samples, images_of(data.supervised))

    def run(self) -> tuple[Metrics, list[Shown]]:
        """Return eval/loss, a mean over the trained tokens of all ranks, and eval/perplexity; no rows. Collective."""
        total = count = 0.0
        for step in make_batches(self.samples, self.rules, rollout=0, images=self.images):
            logprobs = self.backend.compute_logprobs(step.packs, "policy")
            for pack, found in zip(step.packs, logprobs, strict=True):
                total -= found.values.double()[pack.loss_mask].sum().item()
                count += int(pack.loss_mask.sum())
        total, count = sum_over_ranks([total, count])  # ranks that share packs count each token equally often
        loss = total / count
        return {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0))}, []


def held_out_samples(config: Config, builder: SampleBuilder, data: RunData) -> list[Sample]:
    """Build this rank's samples of held-out rows. Leaves out, with a warning, what cannot be trained on.

    Raises DataError if no row is usable. Collective.
    """
    own = config.data.eval_prompt_data
    where = f"--eval-prompt-data {own}" if own else f"--prompt-data {config.data.prompt_data}"
    with raise_on_all_ranks(DataError, where):
        samples, refused = build_samples(builder, own_share(data.supervised))
    refused = sum(gather(refused), Refusals())
    count = refused.counts.total()
    if count == len(data.supervised):
        raise refused.none_usable(f"{where}, held out for evaluation")
    if count:
        example = next(iter(refused.examples.values()))
        log.warning("evaluations leave out %d of %d rows, e.g. %s", count, len(data.supervised), example)
    return samples
