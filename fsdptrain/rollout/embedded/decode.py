"""The decode loop of the embedded engine: one prefill per prompt, then one token per row and step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from fsdptrain.enabled_features import NO_FEATURES, Features
from fsdptrain.rollout.sampling import sample
from fsdptrain.types import Prompt, SamplingParams, Truncation

if TYPE_CHECKING:
    from fsdptrain.data.routes import RouteRecorder
    from fsdptrain.rollout.stop_strings import RowStops

_DROP_SHARE = 0.25  # of the cache: above it, finished rows are dropped


@dataclass(frozen=True)
class Row:
    """One completion to generate."""

    prompt: int  # index of its prompt
    sample: int  # index of the sample of that prompt


@dataclass
class _State:
    """What the next forward pass over one token per row [R] needs."""

    cache: Cache
    positions: Tensor  # of the first response token [R, 1]
    mask: Tensor | None  # [R, P], later [R, P + S]; None: no padding
    rope_offset: Tensor | None  # of multimodal rotary positions to `positions` [R, 1]; None: 0

    def take(self, rows: Tensor) -> None:
        """Replace row i by row `rows[i]`. Rows may repeat or be left out."""
        # the one selection that all kinds of layers support: recurrent states lack the batch_ ones (transformers 5.23)
        self.cache.reorder_cache(cast(torch.LongTensor, rows))
        self.positions = self.positions[rows]
        self.mask = None if self.mask is None else self.mask[rows]
        self.rope_offset = None if self.rope_offset is None else self.rope_offset[rows]


def plan_chunks(
    lengths: Sequence[int], limits: Sequence[int], *, num_samples: int, max_batch_tokens: int
) -> list[list[Row]]:
    """Split rows into chunks that are decoded together: rows x (longest prompt + limit) <= `max_batch_tokens`.

    Longest prompts first, so that prompts of similar length share a chunk and little is padded. The caller has checked
    that each row fits alone. `lengths` of the prompts, `limits` of their responses. [tokens]
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
    recorder: "RouteRecorder | None" = None,
    stop_strings: "RowStops | None" = None,
    features: Features = NO_FEATURES,
) -> tuple[Tensor, Tensor]:
    """Continue `prompts` by up to `limit_of_row` tokens, with one row for each entry of `prompt_of_row`.

    uniforms: [R, S] f64, S the largest limit; they decide every draw. sync_interval: tokens between checks for finished
    rows, each of which waits for the device. recorder: gets the routes of each forward pass. Returns tokens [R, S] i64
    and logprobs [R, S] f32 on the CPU; values after a row's first stop token or string, or its limit, are undefined.
    """
    device, num_steps = uniforms.device, uniforms.shape[1]
    stop = torch.tensor(stop_token_ids, dtype=torch.int64, device=device)
    truncation = Truncation(sampling.top_p, sampling.top_k, sampling.min_p)
    logits, state = prefill(model, prompts, device=device, features=features)
    if recorder is not None:
        recorder.read_prompts()

    rows = torch.tensor(prompt_of_row, device=device)
    logits = logits[rows]
    state.take(rows)  # copies the cache of each prompt for its rows
    if state.mask is not None:
        state.mask = torch.cat([state.mask, state.mask.new_ones(uniforms.shape)], dim=1)  # [R, P + S]

    active = torch.arange(len(rows), device=device)  # row of the result for each row of the cache
    finished = torch.zeros_like(active, dtype=torch.bool)
    limits = torch.tensor(limit_of_row, device=device)[:, None]
    tokens = torch.zeros(uniforms.shape, dtype=torch.int64, device=device)
    logprobs = torch.zeros(uniforms.shape, dtype=torch.float32, device=device)
    for step in range(num_steps):
        draws = uniforms[active, step]
        token, logprob = sample(logits, draws, temperature=sampling.temperature, truncation=truncation)
        tokens[active, step], logprobs[active, step] = token, logprob
        finished |= (token[:, None] == stop).any(-1) | (limits[:, 0] == step + 1)
        is_last, is_checked = step + 1 == num_steps, (step + 1) % sync_interval == 0
        if stop_strings is not None and (is_last or is_checked):
            finished |= stop_strings.ended(active, tokens[active, stop_strings.num_read : step + 1])
        if is_last:
            break
        if is_checked:
            going = (~finished).nonzero().squeeze(-1)  # waits for the device
            if len(going) == 0:
                break
            if len(going) < (1.0 - _DROP_SHARE) * len(active):
                state.take(going)
                active, finished, limits, token = (x[going] for x in (active, finished, limits, token))
        seen = None if state.mask is None else state.mask[:, : state.mask.shape[1] - num_steps + step + 1]
        # a finished row must not exceed the model's last position
        place = state.positions + (limits - 1).clamp(max=step)
        if state.rope_offset is not None:
            place = torch.stack([place, *3 * [place + state.rope_offset]])
        logits = forward(model, token[:, None], seen, place, state.cache)
        if recorder is not None:
            recorder.read_tokens(active)
    return tokens.cpu(), logprobs.cpu()


def prefill(
    model: PreTrainedModel, prompts: Sequence[Prompt], *, device: torch.device, features: Features = NO_FEATURES
) -> tuple[Tensor, _State]:
    """Forward pass over the prompts: logits of the next token [N, V], and the state for the next pass."""
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
    processor, seen = features.prompt_processor, {}
    if processor is not None:
        seen = processor.generation_inputs(model, prompts, ids, (columns >= pads).long().to(device), positions)
    rope_offset = None
    if "position_ids" in seen:
        positions = seen.pop("position_ids")
        rope_offset = positions[1:].amax((0, 2))[:, None] + 1 - lengths[:, None].to(device)
    logits = forward(model, ids, mask, positions, cache, **seen)
    return logits, _State(cache, lengths[:, None].to(device), mask, rope_offset)


def forward(
    model: PreTrainedModel, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: Cache, **images: Any
) -> Tensor:
    """Logits after the last of `ids` [R, S], in the model's dtype: [R, V]. Appends to `cache`."""
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
