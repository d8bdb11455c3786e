"""Load a checkpoint on rank 0 and broadcast it, tensor by tensor, where ranks cannot read their own slices."""

import copy
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from fsdptrain import platform
from fsdptrain.distributed import gather, raise_on_all_ranks
from fsdptrain.errors import CheckpointError
from fsdptrain.model.loading.files import weight_files
from fsdptrain.model.loading.fill import filled_like, own_part, parameter_names
from fsdptrain.model.loading.materialize import quiet_transformers, refuse_leftovers, refuse_misfits, register
from fsdptrain.model.loading.meta import problems_of
from fsdptrain.model.structure import stock_class


def broadcast_from_rank0(model: PreTrainedModel, path: Path, *, cpu_offload: bool) -> None:
    """Load the stock model on rank 0 in host memory and broadcast each tensor; each rank keeps its part.

    The names must be equal on all ranks.
    """
    source: PreTrainedModel | None = None
    with raise_on_all_ranks(CheckpointError, f"--hf-checkpoint {path}"), quiet_transformers():
        if not dist.is_initialized() or dist.get_rank() == 0:
            source = _load_whole(model, path)
    # an export needs these conversions to restore the tensor names of the files
    model._weight_conversions = gather(None if source is None else vars(source).get("_weight_conversions"))[0]
    device = platform.local_device()
    shard_device = torch.device("cpu") if cpu_offload else device
    for names in parameter_names(model):
        parameter = model.get_parameter(names[0])
        whole = _broadcast(source.get_parameter(names[0]) if source is not None else None, parameter, device)
        register(model, names, filled_like(parameter, own_part(whole, parameter), shard_device))
    for name, buffer in list(model.named_buffers()):
        register(model, [name], _broadcast(source.get_buffer(name) if source is not None else None, buffer, device))


def _load_whole(model: PreTrainedModel, path: Path) -> PreTrainedModel:
    """Load the stock model of `path` on the host and check that it matches the meta `model`."""
    weight_files(path)
    source, info = cast(Any, stock_class(model)).from_pretrained(
        path,
        config=copy.deepcopy(model.config),
        dtype=torch.float32,
        use_safetensors=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # refused here, by their names
    )
    refuse_misfits(path, info["mismatched_keys"])
    refuse_leftovers(path, set(info["missing_keys"]), set(info["unexpected_keys"]))
    if problems := problems_of(source, {name: torch.float32 for name, _ in source.named_parameters()}):
        raise CheckpointError(f"--hf-checkpoint {path}: {'; '.join(problems)}")
    assert {n: p.shape for n, p in source.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    assert [n for n, _ in source.named_buffers()] == [n for n, _ in model.named_buffers()]
    return source


@torch.no_grad()
def _broadcast(source: Tensor | None, like: Tensor, device: torch.device) -> Tensor:
    """Broadcast rank 0's whole `source` to `device` of every rank. Other ranks pass None. Collective."""
    whole = torch.empty(like.shape, dtype=like.dtype, device=device)
    if source is not None:
        whole.copy_(source)
    if dist.is_initialized():
        dist.broadcast(whole, src=0)
    return whole
