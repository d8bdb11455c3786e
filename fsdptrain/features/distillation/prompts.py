"""The prompts of a teacher that sees another prompt than the policy, and the packs that it judges."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from fsdptrain.algo.weights import count_totals, num_loss_tokens
from fsdptrain.config import DataConfig
from fsdptrain.data.packing.pack import pack
from fsdptrain.data.prompts import make_prompt
from fsdptrain.data.rows import Row, as_messages
from fsdptrain.errors import RolloutError
from fsdptrain.types import Message, PackedBatch, Prompt, Sample

IDS, LENGTHS = "teacher_prompt_ids", "teacher_prompt_lengths"


def teacher_prompt(template: str, prompt: Prompt, tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> list[int]:
    """Return the token ids of `prompt` with its text, or its last message of the user, put into `template`."""
    source: str | list[Message] = prompt.source if isinstance(prompt.source, str) else list(prompt.source)
    if isinstance(source, list):
        last = max((i for i, message in enumerate(source) if message["role"] == "user"), default=None)
        if last is None:
            raise RolloutError(f"--opd-teacher-prompt: prompt {prompt.id} has no message of the user")
        content = _filled(template, as_messages(source)[last]["content"], prompt.label)
        source[last] = {**source[last], "content": content}
    else:
        source = _filled(template, source, prompt.label)
    row = Row(prompt.id, source, prompt.label, prompt.metadata)
    return make_prompt(row, tokenizer, data=data).token_ids


def _filled(template: str, text: Any, label: Any) -> str:
    values = {"prompt": str(text), "label": "" if label is None else str(label)}
    return re.sub(r"\{(prompt|label)\}", lambda match: values[match[1]], template)


def with_prompts(samples: Sequence[Sample], prompts: Mapping[str, list[int]], *, max_tokens: int) -> list[Sample]:
    """Attach the teacher's prompt of its group to each sequence. Raises RolloutError for one longer than a pack."""

    def finished(sample: Sample) -> Sample:
        ids = prompts[sample.group_id]
        length = len(ids) + len(sample.token_ids) - _prompt_length(sample.loss_mask)
        if length > max_tokens:
            raise RolloutError(
                f"--opd-teacher-prompt makes a sequence of {length} tokens of prompt {sample.group_id}, and a pack has "
                f"{max_tokens}: shorten it, or raise --max-tokens-per-gpu"
            )
        return replace(sample, extras={**sample.extras, IDS: ids}, others=tuple(map(finished, sample.others)))

    return [finished(sample) for sample in samples]


def _prompt_length(loss_mask: Sequence[bool]) -> int:
    """Return the number of tokens before the first generated one."""
    return loss_mask.index(True) if True in loss_mask else len(loss_mask)


def pack_with_prompts(batch: PackedBatch, samples: Sequence[Sample]) -> PackedBatch:
    """Put the teacher's prompts of `samples`, the sequences of a pack, into its extras."""
    ids = [sample.extras[IDS] for sample in samples]
    flat = torch.tensor([token for part in ids for token in part], dtype=torch.int64)
    lengths = torch.tensor([len(part) for part in ids])
    return replace(batch, extras={**batch.extras, IDS: flat, LENGTHS: lengths})


def reprompted(batch: PackedBatch) -> PackedBatch:
    """Return the pack with the teacher's prompts in place of its own: the same loss tokens in the same order."""
    if IDS not in batch.extras:  # the pack of a rank without samples
        return batch
    prompts = batch.extras[IDS].split(batch.extras[LENGTHS].tolist())
    samples = []
    for ids, tokens, mask in zip(
        prompts, batch.input_ids.split(batch.seqlens), batch.loss_mask.split(batch.seqlens), strict=True
    ):
        shifted = [False, *mask.tolist()[:-1]]  # of the token itself, not of the next one
        start = _prompt_length(shifted)
        token_ids = [*ids.tolist(), *tokens.tolist()[start:]]
        loss_mask = [False] * len(ids) + shifted[start:]
        samples.append(Sample("", token_ids, loss_mask, [0.0] * len(token_ids)))
    totals = count_totals([num_loss_tokens(sample) for sample in samples])
    return pack(samples, aggregation="token_mean", totals=totals, max_response_len=1)
