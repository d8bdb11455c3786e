"""What a model is made of, as a short list: repeated layers once, and of each part its class, file, kind and size."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from torch import nn
from transformers import PreTrainedModel

from fsdptrain.model.layer_kinds import LayerKind, layer_kinds
from fsdptrain.model.structure import num_fused_experts, repeated_layers

# The first pattern that the name of a class fits says what it is: the field names its classes by what they do.
_KINDS = {
    "norm": r"Norm",
    "rotary table": r"Rotary|RoPE|Rope",
    "embedding": r"Embedding",
    "router": r"Router|Gate$|TopKGate",
    "experts": r"Experts?$",
    "recurrent mixer": r"DeltaNet|DeltaAttention|Mamba|SSM|Mixer$|Recurrent|ShortConv|LinearAttention|Lightning|Rwkv"
    r"|xLSTM|Retention",
    "attention": r"Attention|Attn$",
    "MLP": r"MLP|Mlp|FeedForward|FFN|MoE|Moe|Sparse|Dense",
    "linear": r"Linear$|Conv1D$",
}
_MIXTURE = "mixture of experts"  # what holds experts; its parts are listed too


@dataclass(frozen=True)
class Part:
    """A line of the tree."""

    path: str  # in its parent; of layers with their span, as `model.layers 0-35`
    class_name: str
    module: str  # the Python module that defines the class
    kind: str
    numel: int  # parameters of one of it, of those above it too where they share (tied weights)
    count: int  # of it, one after the other
    depth: int  # in the tree
    note: str = ""  # what the config says of these layers


def anatomy(model: PreTrainedModel) -> list[Part]:
    """Top down, in the order of the model's own modules."""
    kinds: dict[str, list[LayerKind]] = {}
    for kind in layer_kinds(model):
        kinds.setdefault(kind.path, []).append(kind)
    return list(_parts(model, "", kinds, set(repeated_layers(model))))


def module_kind(module: nn.Module) -> str:
    """`attention`, `norm`, `experts` ...; `other` where the name of the class says nothing that is known."""
    name = type(module).__name__
    if name.startswith("FSDP"):
        name = type(module).__mro__[2].__name__
    if num_fused_experts(module):
        return "experts"
    kind = next((kind for kind, pattern in _KINDS.items() if re.search(pattern, name)), "other")
    return _MIXTURE if kind in {"MLP", "other"} and any(_are_experts(child) for child in module.children()) else kind


def _are_experts(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList) or module_kind(module) == "experts"


def _parts(module: nn.Module, path: str, kinds: dict[str, list[LayerKind]], layers: set[nn.Module]) -> Iterator[Part]:
    """The children of `module`; a child that contains decoder layers is opened, and not listed itself."""
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        if inner in kinds:
            for kind in kinds[inner]:
                yield _part(f"{inner} {kind.span}", kind.layer, "layer", count=len(kind.indices), note=kind.entry)
                yield from _parts_of_layer(kind.layer, depth=1)
        elif layers.intersection(child.modules()):
            yield from _parts(child, inner, kinds, layers)
        elif _numel(child) or module_kind(child) != "other":
            yield _part(inner, child, module_kind(child))


def _parts_of_layer(module: nn.Module, depth: int) -> Iterator[Part]:
    for name, child in module.named_children():
        kind = module_kind(child)
        if not _numel(child):
            continue  # activations and the like
        if isinstance(child, nn.ModuleList):
            first = cast(nn.Module, child[0])
            yield _part(name, first, "experts" if depth > 1 else module_kind(first), count=len(child), depth=depth)
            continue
        yield _part(name, child, kind, depth=depth)
        if kind == _MIXTURE:
            yield from _parts_of_layer(child, depth + 1)


def _part(
    path: str, module: nn.Module, kind: str, *, count: int = 1, depth: int = 0, note: tuple[str, ...] = ()
) -> Part:
    cls = type(module)
    return Part(path, cls.__name__, cls.__module__, kind, _numel(module), count, depth, ", ".join(note))


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
