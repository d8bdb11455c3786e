"""The kind of a module by its class name, and the kinds of decoder layers, one of which can stand for all alike."""

import re
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from fsdptrain.model.sizes import num_fused_experts
from fsdptrain.model.structure import decoder_layers, repeated_layers

_EXPERTS = re.compile(r"Experts?$")
_RECURRENT = re.compile(
    r"DeltaNet|DeltaAttention|Mamba|SSM|Mixer$|Recurrent|ShortConv|LinearAttention|Lightning|Rwkv|xLSTM|Retention"
)


@dataclass(frozen=True)
class LayerKind:
    """Layers of one ModuleList with the same parameters and the same config entries."""

    path: str  # of their ModuleList in the model
    indices: tuple[int, ...]  # within the ModuleList
    layer: nn.Module  # the first of them
    entry: tuple[str, ...]  # values in the per-layer lists of the config, e.g. ("sliding_attention",)

    @property
    def span(self) -> str:
        """The layer indices as text: `0-35`, or `0-2, 4-6 ...` where kinds alternate."""
        runs: list[list[int]] = []
        for index in self.indices:
            if runs and index == runs[-1][-1] + 1:
                runs[-1].append(index)
            else:
                runs.append([index])
        shown = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
        return ", ".join(shown[:2]) + (" ..." if len(shown) > 2 else "")


def layer_kinds(model: PreTrainedModel) -> list[LayerKind]:
    """Return the kinds of all repeated layers, list by list, ordered by the first layer of each kind.

    A vision tower has a separate list. Layers are of one kind if their module classes, the names and shapes of their
    parameters and their entries in the per-layer lists of the text config are equal.
    """
    wanted = set(repeated_layers(model))
    found: list[LayerKind] = []
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and wanted.intersection(module):
            found += _kinds_of_list(model, path, module)
    return found


def are_of_the_text(model: PreTrainedModel, layers: nn.ModuleList) -> bool:
    """Return whether `layers` are the layers that the text config counts. A vision tower may have the same number."""
    return len(layers) == model.config.get_text_config().num_hidden_layers and layers[0] in decoder_layers(model)


def per_layer_lists(model: PreTrainedModel, layers: nn.ModuleList) -> dict[str, list]:
    """Return the entries of the text config with one value per layer of `layers`. Empty for other layers."""
    if not are_of_the_text(model, layers):
        return {}
    values = model.config.get_text_config().to_dict()
    return {k: list(v) for k, v in values.items() if isinstance(v, list | tuple) and len(v) == len(layers)}


def _kinds_of_list(model: PreTrainedModel, path: str, layers: nn.ModuleList) -> list[LayerKind]:
    lists = per_layer_lists(model, layers)
    groups: dict[tuple, list[int]] = {}
    for index, layer in enumerate(layers):
        held = tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
        classes = tuple(type(module).__name__ for module in layer.modules())
        entry = tuple(str(values[index]) for values in lists.values())
        groups.setdefault((held, classes, entry), []).append(index)
    return [LayerKind(path, tuple(group), layers[group[0]], entry) for (_, _, entry), group in groups.items()]


def module_kind(module: nn.Module) -> str:
    """Return `experts`, `recurrent mixer` or `other`."""
    name = type(module).__name__
    if name.startswith("FSDP"):
        name = type(module).__mro__[2].__name__
    if num_fused_experts(module) or _EXPERTS.search(name):
        return "experts"
    return "recurrent mixer" if _RECURRENT.search(name) and "Norm" not in name else "other"
