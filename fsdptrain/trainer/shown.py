"""The samples of a rollout that are logged: their texts, and the logprob of each token when it was sampled."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from fsdptrain.types import Prompt, Sample

MOST_TOKENS = 1024  # logged per response
_LONGEST_CHARACTER = 4  # [tokens] of byte-level tokenizers
_BROKEN = "\ufffd"  # what decoders write for incomplete characters


@dataclass(frozen=True)
class Shown:
    """One sample to log."""

    row: Mapping[str, Any]  # prompt, response, label, reward, and the error of an episode that failed
    sample: Sample  # without routes


def show(prompts: Sequence[Prompt], texts: Sequence[str], samples: Sequence[Sample], count: int) -> list[Shown]:
    """Select up to `count` samples, spread over the rollout."""
    if count == 0:
        return []
    chosen = range(0, len(texts), max(1, len(texts) // count))[:count]
    rows = [
        {"prompt": prompts[i].text, "response": texts[i], "label": prompts[i].label, "reward": samples[i].reward}
        | ({"error": samples[i].error} if samples[i].error else {})
        for i in chosen
    ]
    return [Shown(row, replace(samples[i], routes=None, others=())) for row, i in zip(rows, chosen, strict=True)]


def sample_rows(
    shown: Sequence[Shown], tokenizer: PreTrainedTokenizerBase, trained: Sequence[Sample] = ()
) -> list[dict[str, Any]]:
    """Return the rows to log, with advantages from `trained`, this rank's samples. Other ranks than 0 get none."""
    if dist.get_rank() != 0:
        return []
    advantages = {tuple(sample.token_ids): sample.advantage for sample in trained}
    return [as_row(one, tokenizer, advantages.get(tuple(one.sample.token_ids))) for one in shown]


def as_row(one: Shown, tokenizer: PreTrainedTokenizerBase, advantage: float | None = None) -> dict[str, Any]:
    """Add per-token lists to the row of a sample, of the first `MOST_TOKENS` tokens from its first generated one.

    `tokens` are texts. `rollout_logprobs` are null for tokens of an environment.
    """
    sample = one.sample
    if True not in sample.loss_mask:
        return dict(one.row)
    first = sample.loss_mask.index(True)
    chosen = range(first, min(len(sample.token_ids), first + MOST_TOKENS))
    row = {**one.row, "tokens": token_texts(tokenizer, [sample.token_ids[i] for i in chosen])}
    row["rollout_logprobs"] = [round(sample.rollout_logprobs[i], 4) if sample.loss_mask[i] else None for i in chosen]
    return row if advantage is None else {**row, "advantage": round(advantage, 4)}


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    """Decode tokens one by one. The text of a character of several tokens is at the last of them."""
    texts: list[str] = []
    start = 0  # the first token of a character
    for end in range(1, len(ids) + 1):
        whole = start and not texts[-1].endswith(_BROKEN)
        before = ids[start - 1 : start] if whole else []  # some decoders drop the space of a first token
        known = str(tokenizer.decode(list(before))) if before else ""
        text = str(tokenizer.decode([*before, *ids[start:end]]))[len(known) :]
        texts.append("")
        if text.endswith(_BROKEN) and end - start < _LONGEST_CHARACTER and end < len(ids):
            continue
        if _BROKEN in text and end - start > 1:  # no character after all
            texts[start:] = [str(tokenizer.decode([one])) for one in ids[start:end]]
        else:
            texts[-1] = text
        start = end
    return texts
