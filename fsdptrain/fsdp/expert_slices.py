"""Fused experts of a sharded model under the names of a checkpoint, some at a time.

All experts of a layer are more than a GPU that trains has to spare (DeepSeek-V3: 23 GB), and to take them apart takes
most of that again. Where each has tensors of its own in a checkpoint, a few of each rank are gathered, taken apart and
given on before the next.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import SplitModulelist, WeightConverter

from fsdptrain.model.loading.materialize import local_part

_EXPERT = re.compile(r"\.(\d+)\.(?!.*\.\d+\.)")  # the last number of a name
Tensors = dict[str, Tensor]


def expert_slices(
    name: str,
    tensor: Tensor,
    *,
    most_bytes: int,
    full: Callable[[Tensor], Tensor],
    convert: Callable[[Tensors], Tensors],
) -> Iterator[tuple[str, Tensor]]:
    """(name in a checkpoint, tensor) of all experts in `tensor` [E, ., .], which `in_slices` has found. Collective.

    Some of each rank at a time: as many as are `most_bytes` together when they are `full`, and one at least.
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
    """Of each rank's own experts those from `first` on: sharded as all are, so block by block in the order of ranks."""
    part = local_part(tensor)[first:last]
    shape = torch.Size([blocks * (last - first), *tensor.shape[1:]])
    mesh, placements = tensor.device_mesh, tensor.placements
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=tensor.stride())


def in_slices(name: str, tensor: Tensor, conversions: Sequence[Any], *, most_bytes: int) -> bool:
    """Whether `tensor` is experts, an even number on each rank, that a checkpoint holds one by one; and worth it.

    `conversions`: the `reversed_conversions` of its model.
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
    """The conversions that `revert_weight_conversion` goes through."""
    known = vars(model).get("_weight_conversions")
    return [x.reverse_transform() for x in reversed(known or get_model_conversion_mapping(model, add_legacy=False))]


def _num_blocks(tensor: DTensor) -> int:
    """Into how many parts the experts are dealt; ranks that cut them otherwise have a piece of each in their part."""
    placements: list[tuple[int, Any]] = list(enumerate(tensor.placements))
    return math.prod(tensor.device_mesh.size(axis) for axis, x in placements if not x.is_replicate() and x.dim == 0)
