"""The kind of a module by its class name, and the kinds of decoder layers, one of which can stand for all alike."""

import re

from torch import nn
from transformers import PreTrainedModel

from fsdptrain.model.sizes import num_fused_experts
from fsdptrain.model.structure import decoder_layers, repeated_layers

_EXPERTS = re.compile(r"Experts?$")
_RECURRENT = re.compile(
    r"DeltaNet|DeltaAttention|Mamba|SSM|Mixer$|Recurrent|ShortConv|LinearAttention|Lightning|Rwkv|xLSTM|Retention"
)


def one_of_each_kind(model: PreTrainedModel) -> dict[str, list[int]]:
    """Return the indices of the first repeated layer of each kind, by the path of their ModuleList in the model.

    A vision tower has a separate list. Layers are of one kind if their module classes, the names and shapes of their
    parameters and their entries in the per-layer lists of the text config are equal.
    """
    wanted = set(repeated_layers(model))
    return {
        path: _one_of_each_kind(model, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and wanted.intersection(module)
    }


def are_of_the_text(model: PreTrainedModel, layers: nn.ModuleList) -> bool:
    """Return whether `layers` are the layers that the text config counts. A vision tower may have the same number."""
    return len(layers) == model.config.get_text_config().num_hidden_layers and layers[0] in decoder_layers(model)


def per_layer_lists(model: PreTrainedModel, layers: nn.ModuleList) -> dict[str, list]:
    """Return the entries of the text config with one value per layer of `layers`. Empty for other layers."""
    if not are_of_the_text(model, layers):
        return {}
    values = model.config.get_text_config().to_dict()
    return {k: list(v) for k, v in values.items() if isinstance(v, list | tuple) and len(v) == len(layers)}


def _one_of_each_kind(model: PreTrainedModel, layers: nn.ModuleList) -> list[int]:
    lists = per_layer_lists(model, layers)
    first: dict[tuple, int] = {}
    for index, layer in enumerate(layers):
        held = tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
        classes = tuple(type(module).__name__ for module in layer.modules())
        entry = tuple(str(values[index]) for values in lists.values())
        first.setdefault((held, classes, entry), index)
    return list(first.values())


def module_kind(module: nn.Module) -> str:
    """Return `experts`, `recurrent mixer` or `other`."""
    name = type(module).__name__
    if name.startswith("FSDP"):
        name = type(module).__mro__[2].__name__
    if num_fused_experts(module) or _EXPERTS.search(name):
        return "experts"
    return "recurrent mixer" if _RECURRENT.search(name) and "Norm" not in name else "other"
