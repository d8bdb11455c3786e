"""The decode loop of the embedded engine: one prefill for each prompt, then a token for each row at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from fsdptrain.features.vision.tower import shown
from fsdptrain.model.truncation import Truncation
from fsdptrain.rollout.embedded.routes import RouteRecorder
from fsdptrain.rollout.sampling import sample
from fsdptrain.types import Prompt, SamplingParams

_DROP_SHARE = 0.25  # finished rows are dropped from the cache once they are more than this share of it


@dataclass(frozen=True)
class Row:
    """One completion to make."""

    prompt: int  # index of its prompt
    sample: int  # index among the samples of that prompt


@dataclass
class _Read:
    """What the model needs to read one more token of each row [R]."""

    cache: Cache
    positions: Tensor  # of the first token of the response [R, 1]
    mask: Tensor | None  # [R, P], later with room for the response; None: nothing is padded
    turned: Tensor | None  # by how much rotary positions are ahead of these [R, 1]; None: not at all

    def take(self, rows: Tensor) -> None:
        """Row i becomes what row `rows[i]` was: rows may repeat, or be left out."""
        select_rows(self.cache, rows)
        self.positions = self.positions[rows]
        self.mask = None if self.mask is None else self.mask[rows]
        self.turned = None if self.turned is None else self.turned[rows]


def plan_chunks(
    lengths: Sequence[int], limits: Sequence[int], *, num_samples: int, max_batch_tokens: int
) -> list[list[Row]]:
    """Rows that are decoded together: at most `max_batch_tokens` tokens, were every response of full length.

    Longest prompts first, so that prompts of like length meet and little is padded. A row alone may not exceed the
    budget; the caller has checked. `lengths` of the prompts, `limits` of their responses. [tokens]
    """
    order = sorted(range(len(lengths)), key=lambda prompt: -lengths[prompt])
    rows = [Row(prompt, sample_index) for prompt in order for sample_index in range(num_samples)]
    chunks: list[list[Row]] = []
    longest = limit = 0  # of the last chunk
    for row in rows:
        longest, limit = max(longest, lengths[row.prompt]), max(limit, limits[row.prompt])
        if chunks and (len(chunks[-1]) + 1) * (longest + limit) <= max_batch_tokens:
            chunks[-1].append(row)
        else:
            longest, limit = lengths[row.prompt], limits[row.prompt]
            assert longest + limit <= max_batch_tokens, "a row alone exceeds max_batch_tokens"
            chunks.append([row])
    return chunks


def decode(
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    prompt_of_row: Sequence[int],
    limit_of_row: Sequence[int],
    uniforms: Tensor,
    *,
    sampling: SamplingParams,
    stop_token_ids: Sequence[int],
    sync_interval: int,
    recorder: RouteRecorder | None = None,
) -> tuple[Tensor, Tensor]:
    """Continue `prompts` by up to `limit_of_row` tokens, in one row for each entry of `prompt_of_row`.

    `uniforms` [R, S] f64, S the largest limit, decide every draw. Every `sync_interval` tokens the host looks which
    rows have finished, and drops them from the cache when they are many: each look waits for the device. Returns
    tokens [R, S] i64 and their log-probabilities f32 on the CPU; what stands behind a row's first stop token or its
    limit has no meaning. `recorder` is told of each forward pass.
    """
    device, num_steps = uniforms.device, uniforms.shape[1]
    stop = torch.tensor(stop_token_ids, dtype=torch.int64, device=device)
    truncation = Truncation(sampling.top_p, sampling.top_k, sampling.min_p)
    logits, read = prefill(model, prompts, device=device)
    if recorder is not None:
        recorder.read_prompts()

    rows = torch.tensor(prompt_of_row, device=device)
    logits = logits[rows]
    read.take(rows)  # a copy of its prompt's cache for each row
    if read.mask is not None:
        read.mask = torch.cat([read.mask, read.mask.new_ones(uniforms.shape)], dim=1)  # [R, P + S]

    active = torch.arange(len(rows), device=device)  # rows of the result that are in the cache
    finished = torch.zeros_like(active, dtype=torch.bool)
    limits = torch.tensor(limit_of_row, device=device)[:, None]
    tokens = torch.zeros(uniforms.shape, dtype=torch.int64, device=device)
    logprobs = torch.zeros(uniforms.shape, dtype=torch.float32, device=device)
    for step in range(num_steps):
        draws = uniforms[active, step]
        token, logprob = sample(logits, draws, temperature=sampling.temperature, truncation=truncation)
        tokens[active, step], logprobs[active, step] = token, logprob
        finished |= (token[:, None] == stop).any(-1) | (limits[:, 0] == step + 1)
        if step + 1 == num_steps:
            break
        if (step + 1) % sync_interval == 0:
            going = (~finished).nonzero().squeeze(-1)  # waits for the device
            if len(going) == 0:
                break
            if len(going) < (1.0 - _DROP_SHARE) * len(active):
                read.take(going)
                active, finished, limits, token = (x[going] for x in (active, finished, limits, token))
        seen = None if read.mask is None else read.mask[:, : read.mask.shape[1] - num_steps + step + 1]
        # a row behind its limit must not pass the model's last position
        place = read.positions + (limits - 1).clamp(max=step)
        if read.turned is not None:
            place = torch.stack([place, *3 * [place + read.turned]])
        logits = forward(model, token[:, None], seen, place, read.cache)
        if recorder is not None:
            recorder.read_tokens(active)
    return tokens.cpu(), logprobs.cpu()


def prefill(model: PreTrainedModel, prompts: Sequence[Prompt], *, device: torch.device) -> tuple[Tensor, _Read]:
    """Logits of the next token [N, V], and what it takes to read that."""
    lengths = torch.tensor([len(prompt.token_ids) for prompt in prompts])
    width = int(lengths.max())
    ids = torch.tensor([[0] * (width - len(prompt.token_ids)) + list(prompt.token_ids) for prompt in prompts]).to(
        device
    )
    padded = int(lengths.min()) < width
    columns = torch.arange(width)
    pads = (width - lengths)[:, None]
    mask = (columns >= pads).long().to(device) if padded else None
    positions = (columns - pads).clamp(min=0).to(device)
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    seen = shown(model, prompts, ids, (columns >= pads).long().to(device), positions)
    turned = None
    if "position_ids" in seen:
        positions = seen.pop("position_ids")
        turned = positions[1:].amax((0, 2))[:, None] + 1 - lengths[:, None].to(device)
    logits = forward(model, ids, mask, positions, cache, **seen)
    return logits, _Read(cache, lengths[:, None].to(device), mask, turned)


def select_rows(cache: Cache, rows: Tensor) -> None:
    """Make row i of `cache` what row `rows[i]` was: rows may repeat, or be left out.

    The one selection that layers of every kind have: full and sliding attention, and recurrent states, which lack
    batch_repeat_interleave and batch_select_indices (transformers 5.23).
    """
    cache.reorder_cache(cast(torch.LongTensor, rows))


def forward(
    model: PreTrainedModel, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: Cache, **images: Any
) -> Tensor:
    """Logits after the last of `ids` [R, S], in the model's dtype: [R, V]. Grows `cache`."""
    output = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
        **images,
    )
    return output.logits[:, -1]
