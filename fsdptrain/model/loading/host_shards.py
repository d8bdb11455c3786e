"""Where the shards of --fsdp-cpu-offload are read to: the host, although their mesh is of accelerators."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from fsdptrain.model.loading.fill import filled_like, parameter_names
from fsdptrain.model.loading.materialize import local_part, register


def move_shards_to_host(model: PreTrainedModel) -> dict[tuple[str, ...], nn.Parameter]:
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


def restore_shards(model: PreTrainedModel, originals: dict[tuple[str, ...], nn.Parameter]) -> None:
    """Copy the loaded stand-ins into host tensors of the original mesh, one at a time."""
    for names, original in originals.items():
        read = model.get_parameter(names[0])
        restored = filled_like(original, local_part(read), torch.device("cpu"))
        register(model, [name for name in names if model.get_parameter(name) is read], restored)
