"""Evaluation of supervised runs: the loss of held-out rows."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fsdptrain.config import Config
from fsdptrain.data.packing.pack import drop_overlong
from fsdptrain.data.sft import SampleBuilder
from fsdptrain.distributed import gather, raise_on_all_ranks, sum_over_ranks
from fsdptrain.errors import DataError
from fsdptrain.trainer.backend import PolicyBackend
from fsdptrain.trainer.batches import PackingRules, make_batches
from fsdptrain.trainer.evaluation import Evaluation
from fsdptrain.trainer.samples.sft import Refusals, build_samples
from fsdptrain.trainer.samples.source import images_of, own_share
from fsdptrain.types import Images, Metrics, Prompt, Sample

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LossEvaluation:
    """Held-out samples of this rank, by source of the data."""

    backend: PolicyBackend
    rules: PackingRules
    samples: Mapping[str, list[Sample]]  # the same keys on every rank; "": data of one source
    images: Mapping[str, Images]
    generation: Evaluation | None = None  # with --sft-eval-generate

    @classmethod
    def of(
        cls, config: Config, backend: PolicyBackend, builder: SampleBuilder, held_out: Mapping[str, Sequence[Prompt]]
    ) -> "LossEvaluation":
        """Build the samples of `held_out`. Leaves out rows that cannot be trained on, with a warning. Collective."""
        rules = PackingRules.of(config, layout=backend.layout_probe.layout, features=backend.features)
        limit = {"max_tokens": rules.max_tokens, "overlong_samples": config.batch.overlong_samples}
        samples: dict[str, list[Sample]] = {}
        for source, prompts in held_out.items():
            with raise_on_all_ranks(DataError, "--eval-prompt-data"):
                made, refused = build_samples(builder, own_share(prompts))
                samples[source] = drop_overlong(made, **limit)[0]  # type: ignore[arg-type]
            refused = sum(gather(refused), Refusals())
            count = refused.counts.total()
            if count == len(prompts):
                raise refused.none_usable("held out for evaluation")
            if count:
                example = next(iter(refused.examples.values()))
                log.warning("evaluations leave out %d of %d rows, e.g. %s", count, len(prompts), example)
        images = {name: image for prompts in held_out.values() for name, image in images_of(prompts).items()}
        return cls(backend, replace(rules, steps_per_epoch=1, num_epochs=1), samples, images)

    def run(self) -> tuple[Metrics, list[dict[str, Any]]]:
        """Return eval/loss, a mean over the trained tokens of all ranks, and eval/perplexity, also by source.

        The second value are the generated rows to show, if there are any. Collective.
        """
        sums = {source: self._sums(samples) for source, samples in self.samples.items()}
        whole = tuple(map(sum, zip(*sums.values(), strict=True)))
        metrics = _loss_metrics("eval", *whole)
        if len(sums) > 1:
            for source, pair in sums.items():
                metrics |= _loss_metrics(f"eval/{source}", *pair)
        generated, shown = self.generation.run() if self.generation else ({}, [])
        return metrics | generated, shown

    def _sums(self, samples: Sequence[Sample]) -> tuple[float, float]:
        """Return the sum of the losses of all tokens with a loss, over all ranks, and their number."""
        total = count = 0.0
        for step in make_batches(samples, self.rules, rollout=0, images=self.images):
            logprobs = self.backend.compute_logprobs(step.packs, "policy")
            for pack, found in zip(step.packs, logprobs, strict=True):
                total -= found.values.double()[pack.loss_mask].sum().item()
                count += int(pack.loss_mask.sum())
        total, count = sum_over_ranks([total, count])  # ranks that share packs count each token equally often
        return total, count


def _loss_metrics(name: str, total: float, count: float) -> Metrics:
    loss = total / count
    return {f"{name}/loss": loss, f"{name}/perplexity": math.exp(min(loss, 700.0))}
