"""Bytes that the ranks of a mesh send in a training step, from the model on meta and the sizes of the axes.

    found = step_traffic(model, config, pieces, [Pack(8192, 8000)] * 4)
    sum(x.sent for x in found if x.axis == "tensor")

Counts the bytes that leave one rank in a ring collective, the minimum of any algorithm: (n - 1) / n of the gathered or
reduced size, twice that for an all-reduce; for an all-to-all, everything that is not for the rank itself, with balanced
experts. Norms, metrics and flags (a few numbers per step) are not counted.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from fsdptrain.config import Config
from fsdptrain.errors import ConfigError
from fsdptrain.features.activation_memory.config import ActivationMemoryConfig
from fsdptrain.features.context_parallel.recurrent import recurrent_mixers
from fsdptrain.features.context_parallel.ulysses import repeats_of
from fsdptrain.features.model_parallel.plan import SplitPlan
from fsdptrain.memory.grid import Grid
from fsdptrain.memory.pieces import Piece, Pieces
from fsdptrain.model.module_kind import module_kind
from fsdptrain.model.structure import (
    decoder_layers,
    expert_choice,
    head_widths,
    layer_config,
    lm_head,
    num_fused_experts,
    repeated_layers,
)

Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]
Axis = Literal["shard", "replicate", "expert_shard", "tensor", "expert", "context"]

_REDUCED = 4  # bytes: gradients are reduced in float32
_LOGITS = 4  # bytes: so are sums over the vocabulary
_OF_A_WEIGHT = {
    *("colwise", "colwise_rep", "colwise_gather_output", "rowwise", "rowwise_rep", "rowwise_split_input"),
    *("embedding_rowwise", "replicated_with_grad_allreduce"),
}


@dataclass(frozen=True)
class Pack:
    """The size of a pack. With --context-parallel-size, of all ranks that share it."""

    tokens: int  # rows of the model; each of these ranks has the same number
    loss_tokens: int


@dataclass(frozen=True)
class Collective:
    """All calls of one kind over one axis, for one step of one rank."""

    kind: Kind
    axis: Axis
    ranks: int  # on the axis
    calls: int
    size: float  # bytes of the full tensors: gathered, reduced, or the input of an all-to-all

    @property
    def sent(self) -> float:
        """Bytes that leave the rank."""
        return (2 if self.kind == "all-reduce" else 1) * self.size * (self.ranks - 1) / self.ranks


def step_traffic(model: PreTrainedModel, config: Config, pieces: Pieces, packs: Sequence[Pack]) -> list[Collective]:
    """Count the collectives of one rank's forward and backward of `packs`, including gradient reduction.

    Excludes scoring.
    """
    found: dict[tuple[Kind, Axis], tuple[int, float]] = {}
    grid, itemsize = pieces.grid, getattr(torch, config.compute_dtype_name).itemsize
    for kind, axis, calls, size in (
        *_sharding(model, config, pieces, itemsize, len(packs)),
        *(x for pack in packs for x in _splitting(model, config, pieces, itemsize, pack)),
    ):
        before = found.get((kind, axis), (0, 0.0))
        found[kind, axis] = before[0] + calls, before[1] + size
    ranks = {axis: _ranks(grid, axis) for _, axis in found}
    return [Collective(kind, axis, ranks[axis], *value) for (kind, axis), value in found.items() if ranks[axis] > 1]


_Call = tuple[Kind, Axis, int, float]


def _ranks(grid: Grid, axis: Axis) -> int:
    return {
        "shard": grid.shards,
        "replicate": grid.replicas,
        "expert_shard": grid.expert_shards,
        "tensor": grid.tensor,
        "expert": grid.expert,
        "context": grid.context,
    }[axis]


def _sharding(model: PreTrainedModel, config: Config, pieces: Pieces, itemsize: int, num_packs: int) -> Iterator[_Call]:
    """FSDP: gather layers for forward and backward, the rest once; reduce gradients after each pack."""
    again = 2 if config.fsdp.reshard_after_forward else 1
    groups = [(pieces.of(layer.parameters()), again) for layer in repeated_layers(model)]
    for own, gathers in (*groups, (pieces.outside_layers, 1)):
        for of_experts in (False, True):
            members = [piece for piece in own if piece.of_experts == of_experts]
            if members:
                axis: Axis = "expert_shard" if of_experts else "shard"
                yield from _group(members, axis, pieces.grid, gathers * num_packs, num_packs, itemsize)


def _group(
    members: Sequence[Piece], axis: Axis, grid: Grid, gathers: int, reductions: int, itemsize: int
) -> Iterator[_Call]:
    ranks = _ranks(grid, axis)
    shard, trained = sum(x.largest_shard for x in members), sum(x.largest_shard for x in members if x.trained)
    yield "all-gather", axis, gathers, gathers * ranks * shard * itemsize
    if trained:
        yield "reduce-scatter", axis, reductions, reductions * ranks * trained * _REDUCED
        yield "all-reduce", "replicate", reductions, reductions * trained * _REDUCED


def _splitting(model: PreTrainedModel, config: Config, pieces: Pieces, itemsize: int, pack: Pack) -> Iterator[_Call]:
    """Tensor ranks exchange hidden states, expert ranks tokens, context ranks heads."""
    context = pieces.grid.context
    own = Pack(pack.tokens // context, math.ceil(pack.loss_tokens / context))
    if context > 1:
        yield "all-reduce", "context", 2, 2 * _LOGITS * pack.tokens  # logprobs and entropies
    memory = config.section(ActivationMemoryConfig)
    every = memory.gradient_checkpointing_every if memory.gradient_checkpointing else 0
    mixers = set(recurrent_mixers(model)) if context > 1 else set()
    inside: set[str] = set()
    names = {id(module): name for name, module in model.named_modules()}
    for index, layer in enumerate(decoder_layers(model)):
        prefix = names[id(layer)]
        members = [(f"{prefix}.{name}", module) for name, module in layer.named_modules() if name]
        inside.update(name for name, _ in members)
        again, text = bool(every) and index % every == 0, layer_config(model.config, index)
        yield from _layer(model, text, pieces, members, mixers, itemsize, own.tokens, again=again)
    for name, module in model.named_modules():
        if name not in inside and module is not lm_head(model):
            forward, backward = _module(name, module, pieces.plan, itemsize, own.tokens)
            yield from (*forward, *backward)
    if lm_head(model).get_parameter("weight") in pieces.tensor_parallel_parameters:
        yield from _head(model, config, itemsize, own)


def _layer(
    model: PreTrainedModel,
    text: PreTrainedConfig,
    pieces: Pieces,
    members: Sequence[tuple[str, nn.Module]],
    mixers: set[str],
    itemsize: int,
    tokens: int,
    *,
    again: bool,
) -> Iterator[_Call]:
    """Count the collectives of one layer.

    Args:
        mixers: mixers for which the tokens of a context group are gathered.
        again: the forward pass runs twice, the second time without its last collective, whose result is not needed.
    """
    forward: list[_Call] = []
    gathered = [name for name, _ in members if name in mixers]
    whole = tokens * pieces.grid.context
    for first, backward in _mixing(text, pieces.grid, members, mixers, itemsize, tokens):
        yield from backward
        forward += first
    for name, module in members:
        around = any(_is_within(name, mixer) for mixer in gathered)
        first, backward = _module(name, module, pieces.plan, itemsize, whole if around else tokens)
        if num_fused_experts(module) and pieces.grid.expert > 1:
            first, backward = _experts(model, pieces.grid, itemsize, tokens)
        yield from backward
        forward += first
    yield from forward
    if again:
        ends = bool(forward) and forward[-1][1] == "tensor"
        yield from forward[: len(forward) - ends]


def _is_within(name: str, other: str) -> bool:
    return name == other or name.startswith(f"{other}.")


def _mixing(
    text: PreTrainedConfig,
    grid: Grid,
    members: Sequence[tuple[str, nn.Module]],
    mixers: set[str],
    itemsize: int,
    tokens: int,
) -> Iterator[tuple[list[_Call], list[_Call]]]:
    """Yield the (forward, backward) collectives of the mixers of a layer whose tokens are sharded over ranks."""
    if grid.context == 1:
        return
    gathered = [name for name, _ in members if name in mixers]
    rest = [module for name, module in members if not any(_is_within(name, mixer) for mixer in gathered)]
    if not mixers or any(module_kind(module) == "attention" for module in rest):
        exchanged = _attention(text, grid, itemsize, tokens)
        yield exchanged, exchanged
    size = itemsize * tokens * grid.context * text.hidden_size
    for _ in gathered:
        yield [("all-gather", "context", 1, size)], [("all-to-all", "context", 1, size)]


def _module(
    name: str, module: nn.Module, plan: SplitPlan, itemsize: int, tokens: int
) -> tuple[list[_Call], list[_Call]]:
    """Return the (forward, backward) collectives of one module, by its sharding style."""
    style = plan.tensor.get(name)
    if style in (None, "replicate", "local_params"):
        return [], []
    if style == "mla_kv_a_proj":  # gradient of the part of the keys shared by all heads
        shared = cast(Any, module).config.qk_rope_head_dim
        return [], [("all-reduce", "tensor", 1, itemsize * tokens * shared)]
    if style not in _OF_A_WEIGHT:
        raise ConfigError(f"what {name} sends between tensor ranks, which is split as {style}, is not known")
    weight = module.get_parameter("weight")
    rows, columns = (weight.shape[0], weight.shape[-1])
    out, into = itemsize * tokens * rows, itemsize * tokens * columns
    if style.startswith("colwise"):
        gathered: list[_Call] = [] if style == "colwise" else [("all-gather", "tensor", 1, out)]
        return gathered, [("all-reduce", "tensor", 1, into)]
    if style.startswith("rowwise"):
        return [("all-reduce", "tensor", 1, out)], []
    if style == "embedding_rowwise":
        return [("all-reduce", "tensor", 1, into)], []
    return [], [("all-reduce", "tensor", 1, itemsize * weight.numel())]  # replicated_with_grad_allreduce


def _attention(text: PreTrainedConfig, grid: Grid, itemsize: int, tokens: int) -> list[_Call]:
    """Exchange queries, keys and values for heads, and the attention output back. The backward is the same.

    Keys and values count as often as `UlyssesGroup.to_heads` repeats them.
    """
    heads = text.num_attention_heads // grid.tensor
    shared = (getattr(text, "num_key_value_heads", None) or text.num_attention_heads) // grid.tensor
    width, out = head_widths(text)
    shared *= repeats_of(heads, shared, grid.context)
    numbers = heads * width + shared * (width + out) + heads * out
    return [("all-to-all", "context", 2, itemsize * tokens * numbers)]


def _experts(model: PreTrainedModel, grid: Grid, itemsize: int, tokens: int) -> tuple[list[_Call], list[_Call]]:
    """Send tokens to experts and back, forward and backward. Each rank of a tensor group sends its share."""
    choice, width = expert_choice(model.config), model.config.get_text_config().hidden_size
    assert choice is not None, "experts that are split are counted in the config"
    sent = itemsize * tokens * choice.top_k * width / grid.tensor  # on average: a share may be one token longer
    padded = math.ceil(tokens / grid.tensor) * grid.tensor
    whole: _Call = "all-gather", "tensor", 1, itemsize * padded * width
    counts: _Call = "all-to-all", "expert", 1, 8 * choice.num_experts
    moved: _Call = "all-to-all", "expert", 2, 2 * sent
    weights: _Call = "all-gather", "tensor", 1, itemsize * padded * choice.top_k
    shared = grid.tensor > 1
    return [counts, moved, *([whole] * shared)], [moved, *([whole, weights] * shared)]


def _head(model: PreTrainedModel, config: Config, itemsize: int, pack: Pack) -> Iterator[_Call]:
    """Compute logprobs over a sharded vocabulary: a maximum and three sums per token, and the hidden gradient."""
    chunks = math.ceil(pack.loss_tokens / config.model.chunk_size)
    yield "all-reduce", "tensor", 2 * chunks, (1 + 3) * _LOGITS * pack.loss_tokens
    width = model.config.get_text_config().hidden_size
    yield "all-reduce", "tensor", 1, itemsize * pack.loss_tokens * width
