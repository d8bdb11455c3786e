"""The samples of a rollout that are logged: their texts, and what sampling and training know of each token."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fsdptrain.distributed import gather
from fsdptrain.protocols import Loss
from fsdptrain.types import LogProbs, LossConfig, LossOutput, PackedBatch, Prompt, Sample

MOST_TOKENS = 1024  # logged per response
_LONGEST_CHARACTER = 4  # [tokens] of byte-level tokenizers
_BROKEN = "\ufffd"  # what decoders write for incomplete characters


@dataclass(frozen=True)
class Shown:
    """One sample to log."""

    row: Mapping[str, Any]  # prompt, response, label, reward
    sample: Sample  # without routes


def show(prompts: Sequence[Prompt], texts: Sequence[str], samples: Sequence[Sample], count: int) -> list[Shown]:
    """Select up to `count` samples, spread over the rollout."""
    if count == 0:
        return []
    chosen = range(0, len(texts), max(1, len(texts) // count))[:count]
    rows = [
        {"prompt": prompts[i].text, "response": texts[i], "label": prompts[i].label, "reward": samples[i].reward}
        for i in chosen
    ]
    return [Shown(row, replace(samples[i], routes=None, others=())) for row, i in zip(rows, chosen, strict=True)]


class TrainedTokens:
    """What the loss reads of each token of the samples that rank 0 shows. The constructor and `rows` are collective."""

    def __init__(self, shown: Sequence[Shown]) -> None:
        self._shown = shown
        keys = [(len(one.sample.token_ids), _key(one.sample.token_ids)) for one in shown]
        self._wanted: set[tuple[int, int]] = set(gather(keys)[0])
        self._found: dict[int, Tensor] = {}  # key -> [2, L] f32 on the device: logprobs, advantages

    def recorded_by(self, loss: Loss, packs: Sequence[PackedBatch]) -> Loss:
        """Return `loss`, which now also keeps the values of shown samples in `packs`. Does not wait for the device."""
        places = {id(pack.loss_places): found for pack in packs if (found := self._places(pack))}
        if not places:
            return loss

        def recorded(batch: PackedBatch, logprobs: LogProbs, config: LossConfig) -> LossOutput:
            for key, tokens in places.get(id(batch.loss_places), {}).items():  # the same array as before `to(device)`
                old = None if config.use_rollout_logprobs else batch.old_logprobs
                values = logprobs.values.detach() if old is None else old
                pair = torch.stack([values[tokens].float(), batch.advantages[tokens]])
                self._found.setdefault(key, pair)  # of the first epoch
            return loss(batch, logprobs, config)

        return recorded

    def rows(self, samples: Sequence[Sample], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
        """Return the rows to log. `samples`: those of this rank, with advantages. Other ranks than 0 get none."""
        if not self._wanted:
            return []
        found: dict[int, list[list[float]]] = {}
        for values in gather({key: pair.tolist() for key, pair in self._found.items()}):
            found |= values
        if dist.get_rank() != 0:
            return []
        advantages = {_key(sample.token_ids): sample.advantage for sample in samples}
        rows = []
        for one in self._shown:
            key = _key(one.sample.token_ids)
            rows.append(as_row(one, tokenizer, advantage=advantages.get(key), trained=found.get(key)))
        return rows

    def _places(self, pack: PackedBatch) -> dict[int, slice]:
        """Return key -> positions in `pack` of the wanted samples."""
        lengths, found, start = {length for length, _ in self._wanted}, {}, 0
        for length in pack.seqlens:
            if length in lengths:
                key = _key(pack.input_ids[start : start + length].tolist())
                if (length, key) in self._wanted:
                    found[key] = slice(start, start + length)
            start += length
        return found


def as_row(
    one: Shown,
    tokenizer: PreTrainedTokenizerBase,
    *,
    advantage: float | None = None,
    trained: Sequence[Sequence[float]] | None = None,
) -> dict[str, Any]:
    """Add per-token lists to the row of a sample, of the first `MOST_TOKENS` tokens from its first generated one.

    `tokens` are texts. `rollout_logprobs` and `logprobs` (of the trainer) are null for tokens of an environment.
    `advantages` is present only if they differ between tokens.

    Args:
        advantage: of the sample, if it was not trained on token by token.
        trained: [2][L] logprobs and advantages at position t of token t + 1.
    """
    sample = one.sample
    if True not in sample.loss_mask:
        return dict(one.row)
    first = sample.loss_mask.index(True)
    chosen = range(first, min(len(sample.token_ids), first + MOST_TOKENS))
    row = {**one.row, "tokens": token_texts(tokenizer, [sample.token_ids[i] for i in chosen])}
    row["rollout_logprobs"] = [_short(sample.rollout_logprobs[i], sample.loss_mask[i]) for i in chosen]
    if trained is not None:
        logprobs, advantages = ([values[i - 1] for i in chosen] for values in trained)
        row["logprobs"] = [_short(x, sample.loss_mask[i]) for x, i in zip(logprobs, chosen, strict=True)]
        generated = [x for x, i in zip(advantages, chosen, strict=True) if sample.loss_mask[i]]
        advantage = sum(generated) / len(generated)
        if max(generated) - min(generated) > 1e-6:
            row["advantages"] = [_short(x, sample.loss_mask[i]) for x, i in zip(advantages, chosen, strict=True)]
    return row if advantage is None else {**row, "advantage": round(advantage, 4)}


def rows_without_training(shown: Sequence[Shown], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Return the rows to log of samples that are not trained on. Other ranks than 0 get none."""
    return [as_row(one, tokenizer) for one in shown] if dist.get_rank() == 0 else []


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


def _key(token_ids: Iterable[int]) -> int:
    """Return a number that is the same for the same tokens in every process."""
    return hash(tuple(token_ids))


def _short(value: float, generated: bool) -> float | None:
    return round(value, 4) if generated else None
