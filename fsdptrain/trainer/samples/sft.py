"""Build the samples of supervised fine-tuning from the rows of a data set."""

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from fsdptrain.algo.weights import num_loss_tokens
from fsdptrain.config import Config
from fsdptrain.data.prompts import MOST_UNUSABLE, PromptStream
from fsdptrain.data.sft import LONG_PROMPT, OVERLONG, SampleBuilder
from fsdptrain.data.sft_forms import UnusableRowError
from fsdptrain.data.text import special_tokens
from fsdptrain.distributed import gather, raise_on_all_ranks
from fsdptrain.errors import DataError, RolloutError
from fsdptrain.model.loading.meta import model_config
from fsdptrain.trainer.samples.source import RolloutBatch, images_of, own_share
from fsdptrain.types import Prompt, Sample

log = logging.getLogger(__name__)

CHECKED = 100  # rows at the start


@dataclass
class Refusals:
    """Unusable rows: their number and an example, by kind of error."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, error: UnusableRowError) -> None:
        self.counts[error.kind] += 1
        self.examples.setdefault(error.kind, str(error))

    def __add__(self, other: "Refusals") -> "Refusals":
        return Refusals(self.counts + other.counts, {**other.examples, **self.examples})

    @property
    def reasons(self) -> str:
        """The count and an example of each kind, most frequent first."""
        return "; ".join(f"{count}: {self.examples[kind]}" for kind, count in self.counts.most_common())

    def none_usable(self, where: str) -> DataError:
        return DataError(f"{where}: none of {self.counts.total()} rows can be trained on, {self.reasons}")


@dataclass
class SftSource:
    """Draws rows from a stream and builds samples. Skips and counts unusable rows."""

    stream: PromptStream
    builder: SampleBuilder
    num_samples: int  # of an optimizer step, of all ranks
    in_flight: bool = False
    _warned: set[str] = field(init=False, default_factory=set)  # kinds of refusals

    def run_ahead(self, step: int) -> None:
        """Do nothing: SFT has no engine."""

    def collect(self, step: int) -> RolloutBatch:
        """Draw rows until `num_samples` of them are usable. The samples do not depend on the number of ranks."""
        del step  # the stream tracks its position
        samples: list[Sample] = []
        drawn: list[Prompt] = []
        refused, in_a_row = Refusals(), Refusals()
        while missing := self.num_samples - len(drawn) + refused.counts.total():
            with raise_on_all_ranks(RolloutError, "--prompt-data"):
                prompts = self.stream.next(missing)
                for prompt in prompts:
                    self.stream.record(prompt)
                built, skipped = build_samples(self.builder, own_share(prompts))
            skipped = sum(gather(skipped), Refusals())
            in_a_row = in_a_row + skipped if skipped.counts.total() == missing else Refusals()
            if in_a_row.counts.total() >= MOST_UNUSABLE:
                raise in_a_row.none_usable(f"--prompt-data {self.stream.data.prompt_data}")
            samples, drawn, refused = samples + built, drawn + prompts, refused + skipped
        for kind in refused.counts.keys() - self._warned:  # the first row of each kind
            log.warning("skipping unusable rows, for example: %s", refused.examples[kind])
        self._warned |= refused.counts.keys()
        self.stream.num_too_long += refused.counts[LONG_PROMPT]
        unusable = refused.counts.total() - refused.counts[LONG_PROMPT] - refused.counts[OVERLONG]
        return RolloutBatch(
            normalized(samples),
            num_dropped=refused.counts[OVERLONG] if dist.get_rank() == 0 else 0,
            metrics={"progress/unusable_rows": float(unusable)},
            images=images_of(drawn),
        )


def open_builder(
    config: Config, files: Path, tokenizer: PreTrainedTokenizerBase, stream: PromptStream
) -> SampleBuilder:
    """Return the builder of supervised samples. Raises DataError if none of the first rows is usable."""
    model = model_config(files, trust_remote_code=config.model.trust_remote_code).get_text_config(decoder=True)
    builder = SampleBuilder.of(config, tokenizer, num_tokens=getattr(model, "vocab_size", None))
    if config.run.num_rollout:
        check_first_rows(stream, builder)
    return builder


def build_samples(builder: SampleBuilder, prompts: Sequence[Prompt]) -> tuple[list[Sample], Refusals]:
    samples, refused = list[Sample](), Refusals()
    for prompt in prompts:
        try:
            samples.append(builder.build(prompt))
        except UnusableRowError as error:
            refused.add(error)
    return samples, refused


def normalized(samples: list[Sample]) -> list[Sample]:
    """Scale the weights of tokens such that those of all ranks sum to the number of trained tokens. Collective.

    The loss, a mean over these tokens, is then sum(w * nll) / sum(w). Does nothing if no sample has weights.
    """
    sums = [None if s.token_weights is None else math.fsum(s.token_weights[1:]) for s in samples]
    everywhere = [row for rows in gather([*zip(map(num_loss_tokens, samples), sums, strict=True)]) for row in rows]
    if all(weight is None for _, weight in everywhere):
        return samples
    count = sum(tokens for tokens, _ in everywhere)
    total = math.fsum(tokens if weight is None else weight for tokens, weight in everywhere)
    return [replace(s, token_weights=[w * count / total for w in s.token_weights or s.loss_mask]) for s in samples]


def check_first_rows(stream: PromptStream, builder: SampleBuilder) -> None:
    """Warn about unusable rows among the first, and if no row trains an end-of-turn token.

    Raises DataError if the first 1,000 rows are unusable, or if more than half of the first 100 have inexact masks.
    Does not move the stream.
    """
    state, samples, refused = stream.state_dict(), list[Sample](), Refusals()
    while (tried := len(samples) + refused.counts.total()) < (CHECKED if samples else MOST_UNUSABLE):
        [prompt] = stream.next(1)
        if stream.epoch:
            break
        built, skipped = build_samples(builder, [prompt])
        samples, refused = samples + built, refused + skipped
    if not samples:
        raise refused.none_usable(f"--prompt-data {stream.data.prompt_data}")
    stream.load_state_dict(state)
    if (inexact := refused.counts["inexact mask"]) > tried / 2:
        raise DataError(
            f"--prompt-data {stream.data.prompt_data}: {inexact} of the first {tried} rows have no exact mask of the "
            "turns: set --sft-loss-on last, or use a template with generation tags; e.g. "
            f"{refused.examples['inexact mask']}"
        )
    if cut := sum(sample.truncated for sample in samples):
        log.warning("--overlong-samples truncate cuts %d of the first %d rows", cut, tried)
    if refused.counts:
        log.warning("%d of the first %d rows cannot be trained on, %s", refused.counts.total(), tried, refused.reasons)
    trained = {token for s in samples for token, m in zip(s.token_ids, s.loss_mask, strict=True) if m}
    if not trained & special_tokens(builder.tokenizer):
        log.warning("no row has a loss on a token that ends a turn: the model may not learn to stop")
