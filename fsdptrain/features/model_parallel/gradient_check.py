"""Whether what every rank of a tensor group has whole gets the whole of its gradient.

A parameter that is used between matrices that are split (the norm of a head) sees the heads of one rank. Its gradients
must be added up, which a plan has to ask for. One that forgets it trains, and wrongly, without an error: the ranks go
different ways.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import ConfigError
from fsdptrain.model.loading.materialize import local_part

_DIFFERENT = 1e-2  # of the largest element: ranks compute the same from the same, and parts are of other heads
_NOISE = 1e-5  # of the largest gradient of all: what is less may be rounding, as of a bias that cancels


@torch.no_grad()
def require_whole_gradients(model: nn.Module, tensor: DeviceMesh) -> None:
    """Collective, after a backward pass of the same tokens. ConfigError, on all ranks, with the first that is not."""
    whole = {name: p.grad for name, p in model.named_parameters() if p.grad is not None and not _is_split(p, tensor)}
    if not whole:  # on all ranks: no norm has weights, as in OLMo, and all else is split
        return
    sizes = torch.stack([_difference(local_part(grad), tensor) for grad in whole.values()])
    dist.all_reduce(sizes, op=dist.ReduceOp.MAX)
    least = _NOISE * sizes[:, 1].max()
    wrong = (sizes[:, 0] > _DIFFERENT * sizes[:, 1]) & (sizes[:, 1] > least)
    names = [name for name, is_wrong in zip(whole, wrong.tolist(), strict=True) if is_wrong]
    with raise_on_all_ranks(ConfigError, "--tensor-parallel-size"):
        if names:
            raise ConfigError(
                f"--tensor-parallel-size {tensor.size()}: the plan of transformers leaves each process with a part of "
                f"the gradient of {names[0]} ({len(names)} parameters in all): leave it out"
            )


def _is_split(parameter: nn.Parameter, tensor: DeviceMesh) -> bool:
    """Over the tensor ranks, or over another view of the same ranks, as experts are."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return any(name in ("tensor", "expert") for name in names)


def _difference(grad: Tensor, tensor: DeviceMesh) -> Tensor:
    """[2] the largest distance from the mean of the ranks, and the largest element."""
    if not grad.numel():  # nor have the other ranks of the group any of it
        return grad.new_zeros(2, dtype=torch.float32)
    mean = grad.float().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(mean, group=tensor.get_group())
    mean /= tensor.size()
    return torch.stack([(grad.float() - mean).abs().max(), grad.float().abs().max()])
