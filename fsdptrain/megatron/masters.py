"""Float32 weights and Adam moments, sharded over the ranks that have the same parameters (ZeRO stage 1).

megatron-core's DistributedDataParallel stores all gradients of a kind in one buffer, and the parameters in another.
Rank r owns the r-th of R equal slices of each bucket. Gradients are reduced to their owner only, in float32; the owner
updates its slice, and the parameters are all-gathered. megatron-core's DistributedOptimizer does the same with these
buffers, but accepts only tensors of type `torch.cuda.FloatTensor`, and AdamW is already implemented here.

    model, compute dtype   [.........bucket of rank 0.........|.........of rank 1.........]
    masters, float32       [ a part of each parameter in here ]
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdptrain.megatron.cpu_shims import quiet_megatron
from fsdptrain.megatron.groups import owners, process_groups


def wrap(model: nn.ModuleList) -> list[Any]:
    """Wrap each part in megatron-core's DistributedDataParallel, which only sums: losses hold the global denominator.

    `calculate_per_token_loss` sets its scaling factors to 1, for experts too. Expert gradients are already sums over
    the packs of all expert-parallel ranks and need only the sum over the ranks with the same experts.
    """
    with quiet_megatron():
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    config: Any = model[0].config
    assert config.calculate_per_token_loss, "gradients would be divided by the number of ranks"
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=True
    )
    return [DistributedDataParallel(config, options, part) for part in model]


@dataclass(frozen=True)
class _Part:
    """The slice of one parameter that this rank owns. Offsets in elements."""

    parameter: nn.Parameter  # of the model
    start: int
    stop: int
    master: nn.Parameter  # float32; [stop - start], or [1, stop - start] for matrices: only these get weight decay


class Masters:
    """The float32 masters of a model, by the names of its parameters."""

    def __init__(self, model: nn.ModuleList, wrapped: list[Any]) -> None:
        """wrapped: the result of `wrap`."""
        self._wrapped = wrapped
        self._names = {p: name for name, p in model.named_parameters()}
        self._parameters = {name: p for p, name in self._names.items()}
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._parts: dict[str, _Part] = {}
        for buffer in [x for part in wrapped for x in (*part.buffers, *part.expert_parallel_buffers)]:
            for parameter, (start, stop, bucket) in buffer.param_index_map.items():
                name = self._names[parameter]
                self._groups[name] = buffer.data_parallel_group
                own = _own_run(buffer.buckets[bucket], buffer.data_parallel_group)
                first, last = max(start, own.start), min(stop, own.stop)
                if first < last:
                    self._parts[name] = _part(parameter, first - start, last - start)

    @property
    def line(self) -> str:
        """One line for the log."""
        sizes = sorted({group.size() for group in self._groups.values()}, reverse=True)
        dtype = str(next(iter(self._names)).dtype).removeprefix("torch.")
        kind = "the weights themselves" if dtype == "float32" else f"of weights in {dtype}"
        ranks = " and, of experts, ".join(map(str, sizes))
        return f"float32 masters, {kind}: gradients in float32, AdamW dealt over {ranks} ranks"

    @property
    def named(self) -> dict[str, nn.Parameter]:
        """Masters of this rank by parameter name. Parameters of which this rank owns nothing are absent."""
        return {name: part.master for name, part in self._parts.items()}

    def reduce_gradients(self) -> None:
        """Sum gradients over all ranks that share a parameter, and set the masters' `grad`. Collective; once a step."""
        from megatron.core.distributed import finalize_model_grads

        finalize_model_grads(self._wrapped)
        self.take_gradients()

    def take_gradients(self) -> None:
        """Point the masters' `grad` to views of the reduced gradient buffer."""
        for part in self._parts.values():
            part.master.grad = _flat(vars(part.parameter)["main_grad"], part).view_as(part.master)

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the model and all-gather the parameters. Collective."""
        for part in self._parts.values():
            own = _flat(part.parameter.data, part)
            if own.dtype != torch.float32:  # float32 masters share memory with the model
                own.copy_(part.master.view(-1))
        for part in self._wrapped:
            part.start_param_sync()

    @torch.no_grad()
    def take(self, name: str, whole: Tensor, into: Mapping[str, Tensor] | None = None) -> None:
        """Copy this rank's slice of `whole` to its master, or to the tensor in `into`.

        `whole` has the shape of the parameter `name`.
        """
        part = self._parts.get(name)
        if part is not None:
            target = part.master if into is None else into[name]
            target.view(-1).copy_(whole.reshape(-1)[part.start : part.stop])

    @torch.no_grad()
    def whole(self, name: str, own: Tensor | None) -> Tensor:
        """Gather a tensor from the slices of all ranks. Collective over the ranks that have the parameter.

        own: the slice of this rank, in the shape of its master. Returns float32 in the shape of the parameter. The
        result is bitwise exact: other ranks add zeros to the bits.
        """
        parameter, part = self._parameters[name], self._parts.get(name)
        found = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if part is not None:
            assert own is not None, name
            found[part.start : part.stop] = own.view(-1)
        dist.all_reduce(found.view(torch.int32), group=self._groups[name])
        return found.view(parameter.shape)

    def whole_master(self, name: str) -> Tensor:
        """Gather the master of a parameter in its shape, float32. Collective over ranks that have the parameter."""
        return self.whole(name, self.named.get(name))

    def total_norm(self) -> Tensor:
        """Compute the gradient norm of the whole model, [] float32, identical on every rank. Collective.

        Each rank adds the squares of its slices, divided by the number of tensor-parallel ranks with the same values.
        """
        groups = process_groups()
        squares = [torch.zeros((), dtype=torch.float64, device=next(iter(self._names)).device)]
        for part in self._parts.values():
            count = owners(part.parameter, groups)
            if part.master.grad is not None and count:
                squares.append(part.master.grad.double().square().sum() / count)
        total = torch.stack(squares).sum()
        dist.all_reduce(total)
        return total.sqrt().float()


def _own_run(bucket: Any, group: dist.ProcessGroup) -> range:
    """Return the indices in the buffer that this rank owns."""
    size = bucket.grad_data.numel() // group.size()
    start = bucket.offset + group.rank() * size
    return range(start, start + size)


def _part(parameter: nn.Parameter, start: int, stop: int) -> _Part:
    """Create a slice. For float32 parameters the master shares their memory."""
    own = parameter.data.view(-1)[start:stop].float()
    return _Part(parameter, start, stop, nn.Parameter(own.view(1, -1) if parameter.ndim > 1 else own))


def _flat(tensor: Tensor, part: _Part) -> Tensor:
    return tensor.view(-1)[part.start : part.stop]
