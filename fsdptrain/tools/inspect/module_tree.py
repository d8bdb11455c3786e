"""Summarize the module tree of a model: repeated layers once, with the class, file, kind and size of each part."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from torch import nn
from transformers import PreTrainedModel

from fsdptrain.model.layer_kinds import LayerKind, layer_kinds
from fsdptrain.model.module_kind import MIXTURE, module_kind
from fsdptrain.model.structure import repeated_layers


@dataclass(frozen=True)
class Part:
    """One line of the tree."""

    path: str  # path in the model or parent; for layers with their span, as in `model.layers 0-35`
    class_name: str
    module: str  # Python module that defines the class
    kind: str
    numel: int  # parameters of one instance, including tied ones
    count: int  # number of consecutive instances
    depth: int  # depth in the tree
    note: str = ""  # config entries of these layers


def module_tree(model: PreTrainedModel) -> list[Part]:
    """Return the parts of `model` top down, in module order."""
    kinds: dict[str, list[LayerKind]] = {}
    for kind in layer_kinds(model):
        kinds.setdefault(kind.path, []).append(kind)
    return list(_parts(model, "", kinds, set(repeated_layers(model))))


def _parts(module: nn.Module, path: str, kinds: dict[str, list[LayerKind]], layers: set[nn.Module]) -> Iterator[Part]:
    """Yield the children of `module`. A child that contains repeated layers is replaced with its children."""
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
            continue  # activations and other modules without parameters
        if isinstance(child, nn.ModuleList):
            first = cast(nn.Module, child[0])
            yield _part(name, first, "experts" if depth > 1 else module_kind(first), count=len(child), depth=depth)
            continue
        yield _part(name, child, kind, depth=depth)
        if kind == MIXTURE:
            yield from _parts_of_layer(child, depth + 1)


def _part(
    path: str, module: nn.Module, kind: str, *, count: int = 1, depth: int = 0, note: tuple[str, ...] = ()
) -> Part:
    cls = type(module)
    return Part(path, cls.__name__, cls.__module__, kind, _numel(module), count, depth, ", ".join(note))


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
