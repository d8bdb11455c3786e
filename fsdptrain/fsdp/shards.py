"""Access the shards of an FSDP2 model from outside without leaving stale gathered copies.

After a forward pass without gradient the root group stays gathered, as does every group without reshard-after-forward:
its parameters are plain tensors, and the next gather is a no-op. The next forward does not see writes to the shards,
such as an optimizer step, a load or a swap. Call `model.structure.reshard` before such writes.
"""

from torch import Tensor, nn

from fsdptrain.model.loading.materialize import local_part


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, or a plain tensor itself, without copy or gradient. [local shape]"""
    return local_part(tensor.detach())


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint of `model` by name: parameters and persistent buffers, tied ones once."""
    modules = model.named_modules()
    dropped = {f"{prefix}.{name}".lstrip(".") for prefix, m in modules for name in m._non_persistent_buffers_set}
    buffers = {name: buffer for name, buffer in model.named_buffers() if name not in dropped}
    return dict(model.named_parameters()) | buffers
