"""Locate the parts of a transformers model independently of the names that its authors chose."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from fsdptrain.errors import CheckpointError


def stock_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """Return the transformers class of `model`. FSDP2 replaces it with a subclass that has another name and file."""
    return next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))


@contextmanager
def as_stock(model: PreTrainedModel) -> Iterator[None]:
    """Give `model` its stock class within the context.

    transformers looks up conversions and initializers by the name and file of the class. It treats any other class as
    custom code and leaves buffers that no file holds uninitialized.
    """
    own_class = type(model)
    model.__class__ = stock_class(model)
    try:
        yield
    finally:
        model.__class__ = own_class


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the repeated blocks of the language model in model order, before and after sharding.

    They are the members of a ModuleList whose class transformers never splits over devices (`_no_split_modules`). If a
    model declares no such classes, they are the members of its largest ModuleList. Raises CheckpointError if there are
    none.
    """
    unsplit = set(model._no_split_modules or ())
    lists = _outermost_lists(language_model(model))
    layers = [layer for module_list in lists for layer in module_list if _class_names(layer) & unsplit]
    if layers:
        return layers
    lists = [module_list for module_list in lists if len(module_list) > 0]
    if not lists:
        raise CheckpointError(f"{type(model).__name__} has no repeated layers: fsdptrain shards a model layer by layer")
    return list(max(lists, key=lambda layers: sum(p.numel() for p in layers.parameters())))


def tower_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the repeated blocks outside the language model (a vision tower). Empty for a text-only model."""
    unsplit = set(model._no_split_modules or ())
    inside = set(language_model(model).modules())
    outside = [x for x in _outermost_lists(model) if x not in inside]
    return [layer for module_list in outside for layer in module_list if _class_names(layer) & unsplit]


def repeated_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules to shard one by one: vision layers, then language model layers."""
    return [*tower_layers(model), *decoder_layers(model)]


def language_model(model: PreTrainedModel) -> nn.Module:
    """Return the module that reads tokens: the part described by the text config, or the base model."""
    base, text = base_model(model), model.config.get_text_config()
    if text is model.config:
        return base
    return next((m for m in base.modules() if isinstance(m, PreTrainedModel) and m.config is text), base)


def vision_parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Return the parameters that text tokens never use: vision tower and projector. Empty for a text-only model."""
    text = {p for part in (language_model(model), lm_head(model)) for p in part.parameters()}
    return {name: p for name, p in model.named_parameters() if p not in text}


def freeze_vision(model: PreTrainedModel) -> None:
    """Freeze all parameters outside the language model. Does nothing to a text-only model."""
    for parameter in vision_parameters(model).values():
        parameter.requires_grad_(False)


def base_model(model: PreTrainedModel) -> nn.Module:
    """Return the module that computes hidden states: everything but the head."""
    base = model.base_model
    if base is not model:
        return base
    inner = [child for child in model.children() if isinstance(child, PreTrainedModel)]
    if len(inner) != 1:
        raise CheckpointError(f"{type(model).__name__} has no one part that makes hidden states")
    return inner[0]  # llama4's language model declares a base_model_prefix that it does not have


def lm_head(model: PreTrainedModel) -> nn.Module:
    """Return the module that turns hidden states into logits. Raises CheckpointError if there is none."""
    head = model.get_output_embeddings()
    if head is None:
        raise CheckpointError(f"{type(model).__name__} has no output embedding: it is not a causal language model")
    return head


def reshard(model: nn.Module) -> None:
    """Free all gathered parameters so that they are DTensors and the next forward pass gathers them again."""
    groups = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for group in reversed(groups):  # children first: then only the parent's own parameters are still gathered
        group.reshard()
        if any(not isinstance(p, DTensor) for p in cast(nn.Module, group).parameters()):
            # A forward pass that raised leaves the group in its forward state, where it stays gathered.
            group.set_reshard_after_forward(True, recurse=False)
            group.reshard()
            group.set_reshard_after_forward(False, recurse=False)


def _outermost_lists(model: nn.Module) -> list[nn.ModuleList]:
    """Return every ModuleList that is not nested in another one. The experts of a layer may be nested."""
    found: list[nn.ModuleList] = []
    for child in model.children():
        found += [child] if isinstance(child, nn.ModuleList) else _outermost_lists(child)
    return found


def _class_names(module: nn.Module) -> set[str]:
    """Return the class names of `module` and its bases. Sharding replaces the class of a module with a subclass."""
    return {cls.__name__ for cls in type(module).__mro__}
