"""Gradients of megatron-core: summed over ranks and never divided, in its own buffers, and their global norm."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdptrain.backends.megatron.cpu_shims import quiet_imports
from fsdptrain.backends.megatron.groups import Groups

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


def wrap(model: "GPTModel") -> Any:
    """In megatron-core's DistributedDataParallel, which here only sums: the losses hold the global denominator.

    `calculate_per_token_loss` of the config makes its factors 1, for experts too: their gradients are sums over the
    packs of all expert-parallel ranks already, and need only those of the ranks with the same experts.
    """
    with quiet_imports():
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    assert model.config.calculate_per_token_loss, "gradients would be divided by the number of ranks"
    options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
    return DistributedDataParallel(model.config, options, model)


def reduce_gradients(wrapped: Any) -> None:
    """Over all ranks that share a parameter, once for each step; then they are each parameter's `grad`. Collective."""
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads([wrapped])
    for parameter in wrapped.module.parameters():
        parameter.grad = parameter.main_grad


def total_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Of the gradients of the whole model, [] float32, the same on every rank. Collective.

    Each rank adds its part of what it has divided by how many ranks have the same: no group has to be chosen.
    """
    groups = Groups.present()
    squares: list[Tensor] = []
    for parameter in parameters:
        copies = groups.copies(parameter)
        if parameter.grad is not None and copies:
            squares.append(parameter.grad.double().square().sum() / copies)
    total = torch.stack(squares).sum()
    dist.all_reduce(total)
    return total.sqrt().float()
