"""--opd-on-policy-fraction: the other prompts get the response of the data (lambda of GKD, arXiv 2306.13649)."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from fsdptrain.config import Config
from fsdptrain.data.chat import TurnRenderer
from fsdptrain.data.sft import sft_sample
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import DataError
from fsdptrain.trainer.phases import Stopwatch
from fsdptrain.trainer.samples.single_turn import GenerationRound, Sampler
from fsdptrain.types import Prompt, Sample, SamplingParams

FROM_DATA = "from_data"  # in `Sample.extras`


@dataclass(frozen=True)
class DataShare:
    """Samples by `inner`, except for a share of 1 - `on_policy` of the prompts, each with one sample of its label."""

    inner: Sampler
    on_policy: float
    tokenizer: PreTrainedTokenizerBase
    renderer: TurnRenderer

    @classmethod
    def of(cls, config: Config, inner: Sampler, on_policy: float, tokenizer: PreTrainedTokenizerBase) -> "DataShare":
        return cls(inner, on_policy, tokenizer, TurnRenderer(tokenizer, data=config.data))

    def sample(self, prompts: Sequence[Prompt], sampling: SamplingParams, watch: Stopwatch) -> GenerationRound:
        with raise_on_all_ranks(DataError, "--opd-on-policy-fraction"):
            given = self._given(prompts, sampling)
        made = self.inner.sample([prompt for prompt in prompts if prompt.id not in given], sampling, watch)
        return self._merged(prompts, given, made)

    def sample_in_flight(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, watch: Stopwatch
    ) -> GenerationRound:
        given = self._given(prompts, sampling)
        rest = [prompt for prompt in prompts if prompt.id not in given]
        return self._merged(prompts, given, self.inner.sample_in_flight(rest, sampling, watch))

    def _given(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> dict[str, Sample]:
        """Return the samples of labels, by prompt id."""
        return {prompt.id: self._of_label(prompt) for prompt in prompts if self._is_given(prompt, sampling.seed)}

    def _is_given(self, prompt: Prompt, seed: int) -> bool:
        digest = hashlib.blake2b(f"{seed}/{prompt.id}".encode(), digest_size=8).digest()
        return int.from_bytes(digest) / 2**64 >= self.on_policy

    def _of_label(self, prompt: Prompt) -> Sample:
        sample = sft_sample(prompt, self.tokenizer, renderer=self.renderer)
        return replace(sample, advantage=0.0, extras={FROM_DATA: [1]})

    def _merged(self, prompts: Sequence[Prompt], given: Mapping[str, Sample], made: GenerationRound) -> GenerationRound:
        """Put the samples into the order of the prompts."""
        rows = {
            prompt.id: [(sample, prompt, str(prompt.label))] for prompt in prompts if (sample := given.get(prompt.id))
        }
        for row in zip(made.samples, made.prompts, made.texts, strict=True):
            rows.setdefault(row[1].id, []).append(row)
        ordered = [row for prompt in prompts for row in rows[prompt.id]]
        samples, drawn, texts = ([row[i] for row in ordered] for i in range(3))
        return replace(made, samples=samples, prompts=drawn, texts=texts)
