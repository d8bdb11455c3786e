"""Replace a meta parameter by one with values that were read elsewhere, or whole."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdptrain.model.loading.materialize import local_part


@torch.no_grad()
def filled_like(parameter: nn.Parameter, local: Tensor, device: torch.device) -> nn.Parameter:
    """Return a parameter like the meta `parameter`, on `device`, with the local values `local`."""
    tensor = torch.empty_like(parameter, device=device)
    local_part(tensor).copy_(local)
    return nn.Parameter(tensor, requires_grad=parameter.requires_grad)


def own_part(whole: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of `whole`, sharded like `like`; all of it if `like` is a plain tensor."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to_local()


def parameter_names(model: nn.Module) -> list[tuple[str, ...]]:
    """Return the names of each parameter in model order. A tied parameter has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [tuple(group) for group in names.values()]
