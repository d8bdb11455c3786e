"""The fixed prompts that the engine answers after a weight sync, to compare its logprobs with the trainer's."""

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from fsdptrain.algo.weights import count_totals
from fsdptrain.config import Config
from fsdptrain.data.packing.pack import pack
from fsdptrain.types import Completion, PackedBatch, Prompt, Sample, SamplingParams

_PROMPT_LENGTHS = (160, 16, 16, 16)  # [tokens] the first one fills a block of vLLM's prefix cache
_RESPONSE_LENGTH = 4  # tokens
_PROMPT_ID = "--sync-check/{}"  # part of the seed of each answer: another id would draw other tokens


@dataclass(frozen=True)
class Probe:
    """The same prompts after every sync, so that a prefix cache that outlived a sync shows."""

    prompts: list[Prompt]
    sampling: SamplingParams

    def pack(self, completions: Sequence[Completion]) -> PackedBatch:
        """The batch in which the trainer computes the logprobs of the engine's answers."""
        samples = []
        for prompt, completion in zip(self.prompts, completions, strict=True):
            length, response = len(prompt.token_ids), len(completion.token_ids)
            samples.append(
                Sample(
                    group_id=prompt.id,
                    token_ids=[*prompt.token_ids, *completion.token_ids],
                    loss_mask=[False] * length + [True] * response,
                    rollout_logprobs=[0.0] * length + completion.logprobs,
                )
            )
        totals = count_totals([len(completion.token_ids) for completion in completions])
        return pack(samples, aggregation="token_mean", totals=totals, max_response_len=_RESPONSE_LENGTH)


def make_probe(config: Config, tokenizer: PreTrainedTokenizerBase, *, max_positions: int | None = None) -> Probe:
    """Prompts of random words. `max_positions`: positions that the model has; None if it has no limit."""
    limits = [config.batch.max_tokens_per_gpu // len(_PROMPT_LENGTHS), *([max_positions] if max_positions else [])]
    longest = min(config.prompt_budget, *(limit - _RESPONSE_LENGTH for limit in limits))
    draw = random.Random(config.run.seed)
    prompts = []
    for i, length in enumerate(_PROMPT_LENGTHS):
        words = " ".join("".join(draw.choices(string.ascii_lowercase, k=4)) for _ in range(length))
        ids = tokenizer(words, add_special_tokens=False, verbose=False)["input_ids"]  # at least `length`; cut off
        prompts.append(Prompt(_PROMPT_ID.format(i), list(ids[: max(1, min(length, longest))]), ""))
    rollout = config.rollout
    sampling = SamplingParams(
        num_samples=1,
        max_tokens=min(_RESPONSE_LENGTH, rollout.max_response_len),
        temperature=config.scoring_temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k or -1,
        min_p=rollout.min_p,
        seed=rollout.seed,
    )
    return Probe(prompts, sampling)


def tolerance(dtype: torch.dtype) -> float:
    """Largest mean logprob difference that rounding explains: 32 epsilons of `dtype`, at least 1e-4."""
    return max(1e-4, 32 * torch.finfo(dtype).eps)
