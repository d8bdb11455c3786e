"""Stream the weights of a sharded model under the names of checkpoint files.

All experts of a layer may exceed the free memory of a training GPU (DeepSeek-V3: 23 GB), and splitting them needs
almost as much again. If a checkpoint stores each expert separately, a few experts per rank are gathered, split and
yielded at a time.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import SplitModulelist, WeightConverter, revert_weight_conversion

from fsdptrain.feature import Features
from fsdptrain.fsdp.stream import full_tensor, full_weight
from fsdptrain.model.loading.materialize import local_part

_EXPERT = re.compile(r"\.(\d+)\.(?!.*\.\d+\.)")  # the last number of a name
Tensors = dict[str, Tensor]


def stream_hub_names(
    model: PreTrainedModel,
    units: Sequence[Tensors],
    *,
    dtype: torch.dtype,
    features: Features,
    slice_bytes: int,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (checkpoint name, full tensor) of `units`, groups of tensors that are gathered together. Collective.

    Arguments as in `stream.stream_weights`.
    """
    conversions = reversed_conversions(model)

    def hub(gathered: Tensors) -> Tensors:
        with features.without():  # not across a yield: the caller may run the model
            return revert_weight_conversion(model, gathered)

    for unit in units:
        changes = {name: features.export_weight(name) for name in unit}
        sliced = {
            name: tensor
            for name, tensor in unit.items()
            if in_slices(name, tensor, conversions, most_bytes=slice_bytes) and changes[name] is None
        }
        for name, tensor in sliced.items():
            full = partial(full_tensor, dtype=dtype if isinstance(tensor, nn.Parameter) else tensor.dtype)
            yield from expert_slices(name, tensor, most_bytes=slice_bytes, full=full, convert=hub)
        whole = {name: full_weight(tensor, dtype, changes[name]) for name, tensor in unit.items() if name not in sliced}
        yield from hub(whole).items()


def expert_slices(
    name: str,
    tensor: Tensor,
    *,
    most_bytes: int,
    full: Callable[[Tensor], Tensor],
    convert: Callable[[Tensors], Tensors],
) -> Iterator[tuple[str, Tensor]]:
    """Yield (checkpoint name, tensor) of all experts in `tensor` [E, ., .], which `in_slices` must accept. Collective.

    Gathers some experts of each rank at a time: as many as take `most_bytes` together when gathered, and at least one.
    """
    assert isinstance(tensor, DTensor)
    blocks = _num_blocks(tensor)
    of_rank = tensor.shape[0] // blocks
    count = max(1, most_bytes * of_rank // tensor.nbytes)
    for first in range(0, of_rank, count):
        last = min(first + count, of_rank)
        for found, part in convert({name: full(_rows(tensor, first, last, blocks))}).items():
            number = _EXPERT.search(found)
            assert number is not None, found
            block, row = divmod(int(number[1]), last - first)
            yield _EXPERT.sub(f".{block * of_rank + first + row}.", found), part


def _rows(tensor: DTensor, first: int, last: int, blocks: int) -> DTensor:
    """Return rows `first` to `last` of each rank's experts, sharded like `tensor`: blocks in rank order."""
    part = local_part(tensor)[first:last]
    shape = torch.Size([blocks * (last - first), *tensor.shape[1:]])
    mesh, placements = tensor.device_mesh, tensor.placements
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=tensor.stride())


def in_slices(name: str, tensor: Tensor, conversions: Sequence[Any], *, most_bytes: int) -> bool:
    """Return whether to stream `tensor` in slices.

    True for large fused experts, spread evenly over ranks, that a checkpoint stores one by one. `conversions`: the
    `reversed_conversions` of the model.
    """
    if not isinstance(tensor, DTensor) or tensor.dim() != 3 or tensor.nbytes <= most_bytes:
        return False
    blocks = _num_blocks(tensor)
    if tensor.shape[0] % blocks or tensor.shape[0] == blocks:
        return False
    converters = (x for x in conversions if isinstance(x, WeightConverter))
    own = next((x for x in converters if x.rename_source_key(name)[1] is not None), None)
    if own is None or len(own.source_patterns) > 1:
        return False
    return any(isinstance(op, SplitModulelist) and op.dim == 0 for op in own.operations)


def reversed_conversions(model: PreTrainedModel) -> list[Any]:
    """Return the conversions that `revert_weight_conversion` applies."""
    known = vars(model).get("_weight_conversions")
    return [x.reverse_transform() for x in reversed(known or get_model_conversion_mapping(model, add_legacy=False))]


def _num_blocks(tensor: DTensor) -> int:
    """Return the number of parts that dim 0 is sharded into.

    Ranks that shard another dim hold a slice of each expert in their part.
    """
    placements: list[tuple[int, Any]] = list(enumerate(tensor.placements))
    return math.prod(tensor.device_mesh.size(axis) for axis, x in placements if not x.is_replicate() and x.dim == 0)
