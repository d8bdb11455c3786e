"""Evaluation of supervised runs: the loss of held-out rows."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from fsdptrain.config import Config
from fsdptrain.data.packing.pack import drop_overlong
from fsdptrain.data.sft import SampleBuilder
from fsdptrain.distributed import gather, raise_on_all_ranks, sum_over_ranks
from fsdptrain.errors import DataError
from fsdptrain.protocols import TrainBackend
from fsdptrain.trainer.batches import PackingRules, make_batches
from fsdptrain.trainer.data import RunData
from fsdptrain.trainer.evaluation import Evaluation
from fsdptrain.trainer.samples.sft import Refusals, build_samples
from fsdptrain.trainer.samples.source import images_of, own_share
from fsdptrain.trainer.shown import Shown
from fsdptrain.types import Images, Metrics, Sample

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LossEvaluation:
    """Held-out samples of this rank, by source of the data."""

    backend: TrainBackend
    rules: PackingRules
    samples: Mapping[str, list[Sample]]  # the same keys on every rank; "": data of one source
    images: Mapping[str, Images]
    generation: Evaluation | None = None  # with --sft-eval-generate

    @classmethod
    def of(
        cls,
        config: Config,
        backend: TrainBackend,
        *,
        samples: Mapping[str, list[Sample]],
        data: RunData,
        generation: Evaluation | None,
    ) -> "LossEvaluation":
        """Evaluate `samples` of this rank, without those that a pack cannot hold. Collective."""
        rules = PackingRules.of(config, layout=backend.layout_probe.layout, features=backend.features)
        limit = {"max_tokens": rules.max_tokens, "overlong_samples": config.batch.overlong_samples}
        with raise_on_all_ranks(DataError, "rows held out for evaluation"):
            samples = {name: drop_overlong(made, **limit)[0] for name, made in samples.items()}  # type: ignore[arg-type]
        images = {name: image for prompts in data.supervised.values() for name, image in images_of(prompts).items()}
        return cls(backend, replace(rules, num_steps=1), samples, images, generation)

    def run(self) -> tuple[Metrics, list[Shown]]:
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


def held_out_samples(config: Config, tokenizer: PreTrainedTokenizerBase, data: RunData) -> dict[str, list[Sample]]:
    """Build this rank's samples of held-out rows, by source. Leaves out, with a warning, what cannot be trained on.

    Raises DataError if no row of a source is usable. Collective.
    """
    own = config.data.eval_prompt_data
    where = f"--eval-prompt-data {own}" if own else f"--prompt-data {config.data.data_name}"
    samples: dict[str, list[Sample]] = {}
    for source, prompts in data.supervised.items():
        builder = SampleBuilder.of(config, data.held_out[source], tokenizer)
        with raise_on_all_ranks(DataError, where):
            samples[source], refused = build_samples({"": builder}, own_share(prompts))
        refused = sum(gather(refused), Refusals())
        count = refused.counts.total()
        if count == len(prompts):
            raise refused.none_usable(f"{where}, held out for evaluation")
        if count:
            example = next(iter(refused.examples.values()))
            log.warning("evaluations leave out %d of %d rows, e.g. %s", count, len(prompts), example)
    return samples


def _loss_metrics(name: str, total: float, count: float) -> Metrics:
    loss = total / count
    return {f"{name}/loss": loss, f"{name}/perplexity": math.exp(min(loss, 700.0))}
