"""Read each rank's slices with the reader behind transformers' `from_pretrained`.

This module and `compare.py` use private functions of transformers. `meta.py` checks the version before it imports it.
For a parameter that is a DTensor, the reader reads only the slice that this rank owns.
"""

from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
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
from fsdptrain.model.loading.files import different_files, some_of
from fsdptrain.model.loading.materialize import (
    filled_like,
    local_part,
    parameter_names,
    quiet_transformers,
    refuse_leftovers,
    register,
)
from fsdptrain.model.structure import as_stock


def read_shards(model: PreTrainedModel, path: Path, files: list[Path], *, cpu_offload: bool) -> None:
    """Load `files` with transformers' reader, which slices each safetensors entry like the DTensor of that name."""
    with as_stock(model):
        _read_shards(model, path, files, cpu_offload=cpu_offload)


def _read_shards(model: PreTrainedModel, path: Path, files: list[Path], *, cpu_offload: bool) -> None:
    device = torch.device("cpu") if cpu_offload else platform.local_device()
    shards = _move_shards_to_host(model) if cpu_offload else {}
    load_config = LoadStateDictConfig(
        pretrained_model_name_or_path=str(path),
        dtype=torch.float32,
        device_map={"": device},
        weight_mapping=conversions_of(model),
    )
    with raise_on_all_ranks(CheckpointError, f"--hf-checkpoint {path}"), quiet_transformers():
        info, _ = PreTrainedModel._load_pretrained_model(model, None, [str(file) for file in files], load_config)
        if info.mismatched_keys:
            names = sorted(name for name, _, _ in info.mismatched_keys)
            raise CheckpointError(f"--hf-checkpoint {path}: {some_of(names)} of another shape than config.json says")
        if info.conversion_errors:
            name, reason = min(info.conversion_errors.items())
            raise CheckpointError(f"--hf-checkpoint {path}: cannot convert {name}: {reason.strip().splitlines()[-1]}")
    # Finalizing compares ties across ranks, so the missing keys must be equal on all ranks.
    require_same(sorted(info.missing_keys), different_files(path))
    with raise_on_all_ranks(CheckpointError, f"--hf-checkpoint {path}"), quiet_transformers():
        _mark_what_was_loaded(model)
        info = PreTrainedModel._finalize_model_loading(model, load_config, info)
        refuse_leftovers(path, info.missing_keys, info.unexpected_keys)
        _restore_shards(model, shards)


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


def _move_shards_to_host(model: PreTrainedModel) -> dict[tuple[str, ...], nn.Parameter]:
    """Replace each sharded parameter with a stand-in on a CPU mesh. Returns names -> original.

    The reader places a shard on the device of its DTensor's mesh. With CPU offload that is the accelerator, but the
    shards belong on the host.
    """
    originals: dict[tuple[str, ...], Any] = {}
    meshes: dict[DeviceMesh, DeviceMesh] = {}
    for names in parameter_names(model):
        original = model.get_parameter(names[0])
        if not isinstance(original, DTensor):
            continue
        mesh = original.device_mesh
        if mesh not in meshes:
            meshes[mesh] = init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.mesh_dim_names)
        shard = DTensor.from_local(
            torch.empty(original.to_local().shape, dtype=original.dtype, device="meta"),
            meshes[mesh],
            original.placements,
            run_check=False,
            shape=original.shape,
            stride=original.stride(),
        )
        register(model, names, nn.Parameter(shard, requires_grad=original.requires_grad))
        originals[names] = original
    return originals


def _restore_shards(model: PreTrainedModel, originals: dict[tuple[str, ...], nn.Parameter]) -> None:
    """Copy the loaded stand-ins into host tensors of the original mesh, one at a time."""
    for names, original in originals.items():
        read = model.get_parameter(names[0])
        restored = filled_like(original, local_part(read), torch.device("cpu"))
        register(model, [name for name in names if model.get_parameter(name) is read], restored)
