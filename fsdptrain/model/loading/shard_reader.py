"""Read each rank's slices with the reader behind transformers' `from_pretrained`.

This module and `compare.py` use private functions of transformers. `meta.py` checks the version before it imports it.
For a parameter that is a DTensor, the reader reads only the slice that this rank owns.
"""

from pathlib import Path
from typing import cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig

from fsdptrain import platform
from fsdptrain.distributed import raise_on_all_ranks, require_same
from fsdptrain.errors import CheckpointError
from fsdptrain.model.loading.files import different_files
from fsdptrain.model.loading.materialize import quiet_transformers, refuse_leftovers, refuse_misfits
from fsdptrain.model.structure import as_stock


def read_shards(model: PreTrainedModel, path: Path, files: list[Path], *, cpu_offload: bool) -> None:
    """Load `files` with transformers' reader, which slices each safetensors entry like the DTensor of that name."""
    with as_stock(model):
        if not cpu_offload:
            _read_shards(model, path, files, platform.local_device())
            return
        from fsdptrain.model.loading.host_shards import move_shards_to_host, restore_shards

        shards = move_shards_to_host(model)
        _read_shards(model, path, files, torch.device("cpu"))
        with raise_on_all_ranks(CheckpointError, f"--hf-checkpoint {path}"):
            restore_shards(model, shards)


def _read_shards(model: PreTrainedModel, path: Path, files: list[Path], device: torch.device) -> None:
    load_config = LoadStateDictConfig(
        pretrained_model_name_or_path=str(path),
        dtype=torch.float32,
        device_map={"": device},
        weight_mapping=conversions_of(model),
    )
    with raise_on_all_ranks(CheckpointError, f"--hf-checkpoint {path}"), quiet_transformers():
        info, _ = PreTrainedModel._load_pretrained_model(model, None, [str(file) for file in files], load_config)
        refuse_misfits(path, info.mismatched_keys)
        if info.conversion_errors:
            name, reason = min(info.conversion_errors.items())
            raise CheckpointError(f"--hf-checkpoint {path}: cannot convert {name}: {reason.strip().splitlines()[-1]}")
    # Finalizing compares ties across ranks, so the missing keys must be equal on all ranks.
    require_same(sorted(info.missing_keys), different_files(path))
    with raise_on_all_ranks(CheckpointError, f"--hf-checkpoint {path}"), quiet_transformers():
        _mark_what_was_loaded(model)
        info = PreTrainedModel._finalize_model_loading(model, load_config, info)
        refuse_leftovers(path, info.missing_keys, info.unexpected_keys)


def needs_whole_tensors(model: PreTrainedModel, files: list[Path]) -> str:
    """Return why slices cannot be read, or "".

    A conversion that splits or concatenates along the sharded axis mixes rows of different ranks, with the right shapes
    and without an error. Stacking experts and concatenating their gate and up projections along another axis is exact.
    """
    parameters = model.state_dict()
    mapping = conversions_of(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - not a mapping
                name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, parameters)
                if pattern is not None and not _commutes(by_pattern[pattern], parameters.get(name)):
                    return f"transformers converts {key} of the files by an operation that needs it whole"
    return ""


def conversions_of(model: PreTrainedModel) -> list[WeightConverter | WeightRenaming]:
    with as_stock(model):
        return cast(list[WeightConverter | WeightRenaming], get_model_conversion_mapping(model))


def _commutes(converter: WeightConverter, parameter: Tensor | None) -> bool:
    """Return whether converting the slices gives the slice of the converted tensor."""
    if not isinstance(parameter, DTensor):
        return True
    sharded = {
        placement.dim
        for axis, placement in enumerate(parameter.placements)
        if isinstance(placement, Shard) and parameter.device_mesh.size(axis) > 1
    }
    packed = any(isinstance(placement, _StridedShard) for placement in parameter.placements)
    for operation in converter.operations:
        if isinstance(operation, MergeModulelist) and operation.dim == 0:
            continue
        if isinstance(operation, Concatenate) and operation.dim not in sharded:  # packed: concatenated part by part
            continue
        return not sharded and not packed
    return True


def _mark_what_was_loaded(model: nn.Module) -> None:
    """Mark modules as initialized if all their tensors came from the files.

    The initialization of transformers would not change loaded tensors, but it computes with them, which fails on some
    shards (rwkv, hy_v4). For the other modules it fills the buffers that no file holds.
    """
    for module in model.modules():
        if all(vars(tensor).get("_is_hf_initialized") for tensor in [*module.parameters(), *module.buffers()]):
            module._is_hf_initialized = True  # type: ignore[assignment]
