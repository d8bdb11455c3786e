"""A tiny sharded model, for tests that need no loader: the same weights on any number of ranks."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from fsdptrain.testing import tiny_qwen3


def shard(model: nn.Module, *, replicate_size: int = 1, cpu_offload: bool = False, reshard_after_forward: bool = True):
    """FSDP2 by layer and root; gradients are summed over ranks."""
    size = dist.get_world_size() // replicate_size
    shape, names = ((replicate_size, size), ("replicate", "shard")) if replicate_size > 1 else ((size,), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    policy = CPUOffloadPolicy(pin_memory=False) if cpu_offload else OffloadPolicy()
    for module in [*model.model.layers, model]:
        fully_shard(module, mesh=mesh, offload_policy=policy, reshard_after_forward=reshard_after_forward)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return model


def sharded_qwen3(seed: int = 0, **options):
    """`tiny_qwen3`, sharded. `options` go to `shard`, the others to the config."""
    ours = {k: options.pop(k) for k in ("replicate_size", "cpu_offload", "reshard_after_forward") if k in options}
    return shard(tiny_qwen3(seed, **options).train(), **ours)


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor().detach().clone() if hasattr(tensor, "full_tensor") else tensor.detach().clone()


def full_state(model: nn.Module) -> dict[str, Tensor]:
    from fsdptrain.model.structure import reshard

    reshard(model)
    return {name: full(p) for name, p in model.named_parameters()}


def tokens(seed: int, rows: int = 8, length: int = 24) -> Tensor:
    """[rows, length] the same on every rank."""
    return torch.randint(5, 264, (rows, length), generator=torch.Generator().manual_seed(seed))


def backward(model: nn.Module, optimizer, seed: int, rows: int = 8) -> None:
    """One step's backward passes, two micro-batches, over this rank's share of the rows; the loss is a global mean."""
    ids = tokens(seed, rows)
    world, rank = dist.get_world_size(), dist.get_rank()
    for micro in ids[rank::world].chunk(2):
        logits = model(input_ids=micro, use_cache=False).logits[:, :-1].float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), micro[:, 1:].flatten(), reduction="sum")
        optimizer.scale(loss / ids[:, 1:].numel()).backward()


def train(model: nn.Module, optimizer, seeds) -> list[float]:
    """One optimizer step for each seed; the norms."""
    norms = []
    for seed in seeds:
        optimizer.zero_grad()
        backward(model, optimizer, seed)
        norms.append(optimizer.clip().item())
        optimizer.step()
    return norms
