"""Stream full weights out of a sharded model, layer by layer.

No rank ever holds more than one decoder layer (or the embedding) in full.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from fsdptrain import platform
from fsdptrain.enabled_features import NO_FEATURES, Features
from fsdptrain.fsdp.shards import model_tensors
from fsdptrain.model.loading.materialize import moved
from fsdptrain.model.structure import repeated_layers, reshard

if TYPE_CHECKING:
    from fsdptrain.feature import ChangeWeight
    from fsdptrain.protocols import Naming


def stream_weights(
    model: PreTrainedModel, *, dtype: torch.dtype, naming: "Naming", features: Features = NO_FEATURES
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full tensor) of everything in a checkpoint, on the device of the shards. Collective.

    Every rank must iterate to the end. Tied weights are yielded once. `module` names are those of
    `model.named_parameters()`. `hub` names are the names in the files: transformers' conversions split fused experts.
    Parameters are cast to `dtype` before the gather. Buffers (such as DeepSeek's routing bias) keep their dtype. Names
    are those of the model without the parameters that `features` add. Features apply changes to weights in float32.
    """
    reshard(model)
    with features.without():
        units = _units(model)
    for unit in units:
        full = ((name, full_weight(tensor, dtype, features.export_weight(name))) for name, tensor in unit.items())
        if naming == "module":
            yield from full
            continue
        gathered = dict(full)
        with features.without():  # not across a yield: the caller may run the model
            converted = revert_weight_conversion(model, gathered)
        yield from converted.items()


def _units(model: PreTrainedModel) -> list[dict[str, Tensor]]:
    """Group the tensors that are gathered together.

    Each layer is a group, since conversions stay within a layer. Each other tensor is a group of one.
    """
    layers = set(repeated_layers(model))
    prefixes = [f"{name}." for name, module in model.named_modules() if module in layers]
    inside: dict[str, dict[str, Tensor]] = {prefix: {} for prefix in prefixes}
    units: list[dict[str, Tensor]] = []
    for name, tensor in model_tensors(model).items():
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        if prefix is None:
            units.append({name: tensor})
            continue
        if not inside[prefix]:
            units.append(inside[prefix])
        inside[prefix][name] = tensor
    return units


@torch.no_grad()
def full_weight(tensor: Tensor, dtype: torch.dtype, change: "ChangeWeight | None" = None) -> Tensor:
    """Gather a parameter in `dtype`, or a buffer in its own. change: replaces the shard before it is gathered."""
    dtype = dtype if isinstance(tensor, nn.Parameter) else tensor.dtype
    if change is None:
        return full_tensor(tensor, dtype)
    changed = change(tensor).to(dtype)
    return changed.full_tensor() if isinstance(changed, DTensor) else changed


@torch.no_grad()
def full_tensor(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Gather `tensor` on the device. The shard is cast and moved first."""
    tensor = moved(tensor, platform.local_device(), dtype)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
