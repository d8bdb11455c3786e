"""Activation traces of one rank where tensor and expert parallelism split a layer.

A rank of a tensor group computes a narrower model of the same class: fewer heads, narrower MLPs, a part of the
vocabulary. If a config cannot express the narrower model, the whole layer is traced, which overestimates memory and
never underestimates it. Balanced experts process as many rows as without expert parallelism, divided by the tensor
group. The tokens sent to experts are added.
"""

import copy
import math
from dataclasses import replace
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from fsdptrain.memory.pieces import Pieces
from fsdptrain.model.architecture import model_from_config
from fsdptrain.model.layer_kinds import LayerKind, layer_kinds
from fsdptrain.model.loading.materialize import quiet_transformers
from fsdptrain.model.probes.random_copy import keep_one_of_each_kind
from fsdptrain.model.structure import TOP_K_KEYS, decoder_layers, expert_choice, lm_head, num_fused_experts
from fsdptrain.tools.plan.trace import LayerTrace, Trace

_DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "shared_expert_intermediate_size")
_SAVED_COPIES, _PEAK_COPIES = 1, 2  # copies of the tokens sent to experts: saved for backward, and alive at the peak


def config_of_slice(model: PreTrainedModel, pieces: Pieces, *, trust_remote_code: bool) -> PreTrainedConfig:
    """Return the config of the layers that one rank computes, with the vocabulary of its part of the head."""
    size = pieces.grid.tensor
    if size == 1:
        return model.config
    narrow = copy.deepcopy(model.config)
    text = narrow.get_text_config()
    values = text.to_dict()
    if "head_dim" in values:
        text.head_dim = values["head_dim"] or text.hidden_size // text.num_attention_heads
    for key in (*_DIVIDED, *(TOP_K_KEYS if pieces.grid.expert > 1 else ())):
        if isinstance(values.get(key), int) and values[key] % size == 0:
            setattr(text, key, values[key] // size)
    if not _has_the_shapes(narrow, model, pieces, trust_remote_code):
        narrow = copy.deepcopy(model.config)
        text = narrow.get_text_config()
    if _splits_head(model, pieces):
        text.vocab_size = math.ceil(values["vocab_size"] / size)
        text.pad_token_id = None  # the pad token may be in another part
    return narrow


def on_one_rank(trace: Trace, model: PreTrainedModel, pieces: Pieces, *, num_tokens: int, itemsize: int) -> Trace:
    """Adjust the trace of a slice for the parameters that a rank gathers and the tokens that it sends to experts."""
    grid = pieces.grid
    if grid.tensor == grid.expert == 1:
        return trace
    layers = []
    choice = expert_choice(model.config)
    for layer, kind in zip(trace.layers, _kinds_of_text(model), strict=True):
        own = pieces.of(kind.layer.parameters())
        trained = sum(piece.numel for piece in own if piece.trained)
        dispatched = 0
        if grid.expert > 1 and choice is not None and any(num_fused_experts(m) for m in kind.layer.modules()):
            rows = num_tokens * choice.top_k // grid.tensor
            dispatched = rows * model.config.get_text_config().hidden_size * itemsize
        layers.append(_changed(layer, sum(piece.numel for piece in own), trained, dispatched, itemsize))
    embedding = cast(nn.Module, model.get_input_embeddings()).get_parameter("weight")
    rest = pieces[embedding].numel - math.ceil(embedding.numel() / grid.tensor) if _splits_head(model, pieces) else 0
    return replace(trace, layers=tuple(layers), end_peak=trace.end_peak + rest * itemsize)


def _changed(layer: LayerTrace, numel: int, trained: int, dispatched: int, itemsize: int) -> LayerTrace:
    return replace(
        layer,
        numel=numel,
        trained=trained,
        saved=layer.saved + _SAVED_COPIES * dispatched,
        forward_peak=layer.forward_peak + _PEAK_COPIES * dispatched,
        backward_peak=layer.backward_peak - itemsize * (layer.trained - trained) + _PEAK_COPIES * dispatched,
    )


def _splits_head(model: PreTrainedModel, pieces: Pieces) -> bool:
    return lm_head(model).get_parameter("weight") in pieces.tensor_parallel_parameters


def _kinds_of_text(model: PreTrainedModel) -> list[LayerKind]:
    text = {id(layer) for layer in decoder_layers(model)}
    return [kind for kind in layer_kinds(model) if id(kind.layer) in text]


def _has_the_shapes(narrow: PreTrainedConfig, model: PreTrainedModel, pieces: Pieces, trust_remote_code: bool) -> bool:
    """Return whether the layers of `narrow` match the pieces of one rank. Ignores experts."""
    with torch.device("meta"), quiet_transformers():
        narrow_model = model_from_config(
            copy.deepcopy(narrow), dtype=torch.float32, trust_remote_code=trust_remote_code
        )
    keep_one_of_each_kind(narrow_model)
    kinds = _kinds_of_text(model)
    layers = decoder_layers(narrow_model)
    if len(kinds) != len(layers):
        return False
    return all(
        pieces[whole].of_experts or pieces[whole].numel == part.numel()
        for kind, layer in zip(kinds, layers, strict=True)
        for whole, part in zip(kind.layer.parameters(), layer.parameters(), strict=True)
    )
