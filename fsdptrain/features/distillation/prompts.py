"""The prompts of a teacher that sees another prompt than the policy, and the packs that it judges."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from fsdptrain.algo.weights import count_totals, num_loss_tokens
from fsdptrain.config import DataConfig
from fsdptrain.data.packing.pack import pack, plan_packs
from fsdptrain.data.prompts import make_prompt
from fsdptrain.data.rows import Row, as_messages
from fsdptrain.distributed import gather
from fsdptrain.errors import RolloutError
from fsdptrain.features.distillation.teacher import TeacherScores
from fsdptrain.types import Message, PackedBatch, Prompt, Sample

IDS, BEFORE = "teacher_prompt_ids", "prompt_length"  # of samples
LENGTHS = "teacher_prompt_lengths"  # [N, 2] of packs, beside IDS: of the teacher's prompt, of the policy's


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


def with_prompts(
    samples: Sequence[Sample],
    prompts: Mapping[str, Prompt],
    ids: Mapping[str, list[int]],
    *,
    max_tokens: int,
    drops: bool,
) -> list[Sample]:
    """Attach the teacher's prompt of its group to each sample.

    If the sequence of the teacher is longer than a pack, drop the sample or raise RolloutError.
    """
    kept = []
    for sample in samples:
        before = len(prompts[sample.group_id].token_ids)
        length = len(ids[sample.group_id]) + len(sample.token_ids) - before
        if length <= max_tokens:
            kept.append(replace(sample, extras={**sample.extras, IDS: ids[sample.group_id], BEFORE: [before]}))
        elif not drops:
            raise RolloutError(
                f"--opd-teacher-prompt makes a sequence of {length} tokens of prompt {sample.group_id}, and a pack has "
                f"{max_tokens}: shorten it, raise --max-tokens-per-gpu, or use --overlong-samples drop"
            )
    return kept


def pack_with_prompts(batch: PackedBatch, samples: Sequence[Sample]) -> PackedBatch:
    """Put the teacher's prompts of `samples`, the sequences of a pack, into its extras."""
    ids = [sample.extras[IDS] for sample in samples]
    flat = torch.tensor([token for part in ids for token in part], dtype=torch.int64)
    lengths = torch.tensor([[len(part), sample.extras[BEFORE][0]] for part, sample in zip(ids, samples, strict=True)])
    return replace(batch, extras={**batch.extras, IDS: flat, LENGTHS: lengths})


def score_with_prompts(
    packs: Sequence[PackedBatch],
    score: Callable[[Sequence[PackedBatch]], list[TeacherScores]],
    *,
    max_tokens: int,
) -> list[TeacherScores]:
    """Score the sequences of `packs` with the teacher's prompts, in packs of their own. Collective."""
    samples = [_reprompted(batch) for batch in packs]
    flat = [sample for of_pack in samples for sample in of_pack]
    plan = plan_packs([len(sample.token_ids) for sample in flat], num_ranks=1, max_tokens=max_tokens).packs[0]
    totals = count_totals([num_loss_tokens(sample) for sample in flat])
    of_plan = [[flat[i] for i in chosen] for chosen in plan]
    of_plan += [[] for _ in range(max(gather(len(plan))) - len(plan))]  # equally many on every rank
    found = score([pack(group, aggregation="token_mean", totals=totals, max_response_len=1) for group in of_plan])
    by_sample: dict[int, TeacherScores] = {}
    for chosen, scores in zip(plan, found, strict=False):
        counts = [num_loss_tokens(flat[i]) for i in chosen]
        by_sample |= dict(zip(chosen, scores.split(counts), strict=True)) if sum(counts) else {}
    filler = found[0].split([1])[0]  # of a pack without loss tokens
    places = iter(range(len(flat)))
    merged = [[by_sample[i] for i in islice(places, len(of_pack)) if i in by_sample] for of_pack in samples]
    return [TeacherScores.cat(parts) if sum(len(part.logprobs) for part in parts) else filler for parts in merged]


def _reprompted(batch: PackedBatch) -> list[Sample]:
    """Return the sequences of a pack with the teacher's prompts: the same loss tokens in the same order."""
    if IDS not in batch.extras:  # the pack of a rank without samples
        return []
    lengths = batch.extras[LENGTHS]
    prompts = batch.extras[IDS].split(lengths[:, 0].tolist())
    parts = (x.split(batch.seqlens) for x in (batch.input_ids, batch.loss_mask))
    samples = []
    for ids, before, tokens, mask in zip(prompts, lengths[:, 1].tolist(), *parts, strict=True):
        shifted = [False, *mask.tolist()[:-1]]  # of the token itself, not of the next one
        token_ids = [*ids.tolist(), *tokens.tolist()[before:]]
        loss_mask = [False] * len(ids) + shifted[before:]
        samples.append(Sample("", token_ids, loss_mask, [0.0] * len(token_ids)))
    return samples
