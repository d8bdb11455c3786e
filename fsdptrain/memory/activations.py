"""What a pack and a key-value cache take, from the shapes of the modules. No model is run.

Of each decoder layer, a token keeps for the backward pass the side of each matrix product that is not the residual
stream, the results of an activation function, and of a norm its input in float32, the normalized values and the result.
"""

import math

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from fsdptrain.config import Config
from fsdptrain.model.sizes import expert_choice, head_widths, is_of_adapter, layer_config, num_fused_experts
from fsdptrain.model.structure import decoder_layers

_ROWS = 512  # of logits that are in float32 at a time


class LayerBytes:
    """Bytes that one decoder layer keeps per token."""

    def __init__(self, layer: nn.Module, config: PreTrainedConfig, *, itemsize: int, tensor: int) -> None:
        """`tensor`: ranks over which the matrices of a layer are split."""
        hidden, choice = config.get_text_config().hidden_size, expert_choice(config)
        top_k = choice.top_k if choice else 1
        one_by_one = [x for x in layer.modules() if isinstance(x, nn.ModuleList) and len(x) > top_k and choice]
        shares = {module: top_k / len(experts) for experts in one_by_one for module in experts.modules()}
        widths = norms = 0.0  # sides of matrix products beside the residual stream; elements of norms
        for name, module in layer.named_modules():
            parent, children = layer.get_submodule(name.rpartition(".")[0]), dict(module.named_children())
            share = shares.get(module, 1.0) / tensor
            if is_of_adapter(f".{name}."):
                continue
            if (shape := _matrix(module)) is not None:
                widths += share * (shape[0] if shape[1] == hidden or shape[0] != hidden else shape[1])
            elif num_fused_experts(module):
                sides = [sum(p.shape[1:]) - hidden for p in module.parameters(recurse=False) if p.dim() == 3]
                widths += top_k / tensor * (sum(sides) + len(sides) * hidden + min(sides))  # tokens copied to experts
            elif _is_norm(module):
                norms += _norm_elements(module, name.rpartition(".")[2], parent, hidden, tensor)
            if "act_fn" in children and not num_fused_experts(module):
                widths += share * max((max(m) for child in children.values() if (m := _matrix(child))), default=0)
        self.input = itemsize * hidden  # [bytes]
        self.compiled = math.ceil(itemsize * (widths + norms))  # elementwise operations are recomputed
        self.everything = math.ceil(itemsize * widths + (torch.float32.itemsize + 2 * itemsize) * norms)


def activation_memory(model: PreTrainedModel, config: Config) -> tuple[dict[str, int], int]:
    """Return the device memory of a full pack by purpose, and the bytes of activations on the host. [bytes]"""
    itemsize, tensor = getattr(torch, config.compute_dtype_name).itemsize, config.ranks_along("tensor")
    tokens = config.batch.max_tokens_per_gpu
    layers = [LayerBytes(x, model.config, itemsize=itemsize, tensor=tensor) for x in decoder_layers(model)]
    everything = [layer.compiled if config.value("compile") else layer.everything for layer in layers]
    kept = list(everything)
    if config.value("gradient_checkpointing"):
        kept = [layer.input for layer in layers]
    saved, working = tokens * sum(kept), tokens * max(everything)
    offloaded = saved if config.value("offload_activations") else 0
    if offloaded:
        saved = tokens * max(kept)
    text = model.config.get_text_config()
    chunk = min(config.model.logprob_chunk_size, tokens)
    vocabulary = math.ceil(text.vocab_size / tensor)
    # one buffer of logits, and passes over a few rows in float32
    logits = vocabulary * (chunk * itemsize + min(chunk, _ROWS) * 2 * torch.float32.itemsize)
    more = working if config.value("gradient_checkpointing") else 0
    return {"activations": saved + max(0, more - logits), "logprobs": logits}, offloaded


def cache_bytes(config: PreTrainedConfig, *, num_tokens: int, itemsize: int) -> int:
    """Return the bytes of the key-value cache of one row in the embedded engine."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    total = 0
    for i, kind in enumerate(kinds):
        if "attention" in kind and "linear" not in kind:
            layer = layer_config(config, i)
            heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
            window = getattr(text, "sliding_window", None) if "sliding" in kind else None
            total += min(num_tokens, window or num_tokens) * heads * sum(head_widths(layer)) * itemsize
    return total


def _matrix(module: nn.Module) -> tuple[int, int] | None:
    """Return (outputs, inputs) of a linear layer, or None."""
    weight = module.weight if isinstance(module, nn.Linear) else None
    return None if weight is None else (weight.shape[0], weight.shape[1])


def _is_norm(module: nn.Module) -> bool:
    weights = dict(module.named_parameters(recurse=False))
    return "weight" in weights and weights["weight"].dim() == 1


def _norm_elements(module: nn.Module, name: str, parent: nn.Module, hidden: int, tensor: int) -> float:
    """Return the elements per token of a norm: of the hidden states, or of all heads of a projection."""
    width = module.get_parameter("weight").numel()
    projection = _matrix(dict(parent.named_children()).get(name.replace("norm", "proj"), parent))
    return width if width == hidden or projection is None else projection[0] / tensor
