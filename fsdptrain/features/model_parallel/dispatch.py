"""Token dispatch to split experts: transformers' dispatch with overlapped computation and load counters.

The stock dispatch waits for its first all-to-all where it starts it. Here start and wait are separate, so a block can
compute other work in between; see `features/model_parallel/shared_expert.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import AllToAllEP, EPImplementationInterface, _AllToAllState

from fsdptrain.types import Metrics

NAME = "fsdptrain"


class CountedDispatch(AllToAllEP):
    """The dispatch of one experts module. No token is dropped: each rank receives all rows sent to it."""

    def __init__(self, experts: nn.Module, *meshes: Any) -> None:
        super().__init__(experts, *meshes)
        self.routed = 0.0  # rows routed on this rank; split evenly over the ranks of a tensor group
        self.arrived = 0  # rows computed by the experts on this rank
        self.meanwhile: Callable[[], None] = lambda: None  # called while tokens are in transit
        setattr(experts, NAME, self)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        self.routed += top_k_index.numel() / self.tp_mesh.size()
        output = super().__call__(hidden_states, top_k_index, top_k_weights)
        # FSDP registers its hook on the output, and an in-place operation on a view would lose it.
        return output.clone() if self.tp_mesh.size() > 1 else output

    def _dispatch_tokens(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, _AllToAllState]:
        """Send rows to their experts. Returns the received rows, their experts and weights, and the return state.

        A row is a token for one of its experts. Rows are sent in expert order, and each rank has a contiguous range of
        experts. Received rows are ordered by sender, then by local expert. The return values are those of the stock
        method.
        """
        num_tokens, top_k = len(hidden_states), top_k_index.shape[-1]
        if self.tp_mesh.size() > 1:
            parts = (self._own_part(x) for x in (hidden_states, top_k_index, top_k_weights))
            hidden_states, top_k_index, top_k_weights = parts
        experts = top_k_index.flatten()
        order = experts.argsort()
        here, ranks = cast(int, self.num_local_experts), self.ep_mesh.size()
        # bincount would wait for the device
        counts = torch.zeros(here * ranks, dtype=torch.int64, device=experts.device)
        leaving = counts.scatter_add_(0, experts, torch.ones_like(experts)).view(ranks, here)
        coming = torch.empty_like(leaving)
        dist.all_to_all_single(coming, leaving, group=self.ep_mesh.get_group())
        send_sizes, recv_sizes = torch.stack([leaving.sum(1), coming.sum(1)]).tolist()  # the host waits here
        self.arrived += sum(recv_sizes)
        trip = AsyncAllToAll(self.ep_mesh.get_group(), send_sizes, recv_sizes)
        pending = StartAllToAll.apply(hidden_states[order // top_k], trip)
        self.meanwhile()
        of_rows = torch.arange(here, device=coming.device).repeat(ranks)
        of_rows = of_rows.repeat_interleave(coming.flatten(), output_size=sum(recv_sizes))[:, None]
        rows = WaitAllToAll.apply(pending, trip)
        weights = torch.ones_like(of_rows, dtype=rows.dtype)  # the router weights are applied after the rows return
        return rows, of_rows, weights, _AllToAllState(top_k_weights, order, send_sizes, recv_sizes, num_tokens)

    def _own_part(self, rows: Tensor) -> Tensor:
        """Return this rank's part of rows that are equal on all ranks of a tensor group.

        Backward gathers the gradients of all parts.
        """
        whole = DTensor.from_local(rows, self.tp_mesh, [Replicate()], run_check=False)
        return whole.redistribute(self.tp_mesh, [Shard(0)]).to_local()


class AsyncAllToAll:
    """An asynchronous all-to-all of rows, and of their gradients in the backward pass."""

    def __init__(self, group: dist.ProcessGroup, send_sizes: list[int], recv_sizes: list[int]) -> None:
        self._group = group
        self._there, self._back = (recv_sizes, send_sizes), (send_sizes, recv_sizes)
        self._under_way: tuple[dist.Work, Tensor, Tensor] | None = None  # keeps the sent tensor alive

    def start(self, rows: Tensor, *, back: bool = False) -> Tensor:
        """Start the all-to-all. Returns the receive buffer, which is valid after `end`."""
        coming, leaving = self._back if back else self._there
        rows, found = rows.contiguous(), rows.new_empty(sum(coming), *rows.shape[1:])
        work = dist.all_to_all_single(found, rows, coming, leaving, group=self._group, async_op=True)
        assert work is not None
        self._under_way = work, rows, found
        return found

    def end(self) -> Tensor:
        assert self._under_way is not None
        work, _, found = self._under_way
        work.wait()
        self._under_way = None
        return found


class StartAllToAll(torch.autograd.Function):
    """Start an all-to-all. The backward pass waits for that of the gradients, which `WaitAllToAll` has started.

    Autograd runs in reverse order: the backward pass of computation between start and wait also runs between them.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, trip: AsyncAllToAll) -> Tensor:
        ctx.trip = trip
        return trip.start(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.trip.end(), None


class WaitAllToAll(torch.autograd.Function):
    """Wait for an all-to-all. Backward returns a placeholder of the right shape, which `StartAllToAll` ignores."""

    @staticmethod
    def forward(ctx: Any, pending: Tensor, trip: AsyncAllToAll) -> Tensor:
        ctx.trip = trip
        trip.end()
        return pending.view_as(pending)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.trip.start(grads[0], back=True)
        return grads[0], None


def dispatch_of(experts: nn.Module) -> CountedDispatch | None:
    """Return the dispatch of an experts module, or None if the experts are not split."""
    found = vars(experts).get(NAME)
    return found if isinstance(found, CountedDispatch) else None


def register_dispatch() -> str:
    """Register the dispatch and return its name for `apply_expert_parallelism`."""
    EPImplementationInterface.register(NAME, CountedDispatch)
    return NAME


class Dispatches:
    """All dispatches of one model."""

    def __init__(self, model: nn.Module) -> None:
        self._all: Sequence[CountedDispatch] = [x for x in map(dispatch_of, model.modules()) if x is not None]

    def reset(self) -> None:
        for dispatch in self._all:
            dispatch.routed, dispatch.arrived = 0.0, 0

    def metrics(self, device: torch.device) -> Metrics:
        """Compute load metrics since `reset`, over all ranks. Includes padding and recomputation. Collective.

        moe/rank_load_max: rows of the most loaded rank in any layer, relative to the mean (1: balanced).
        moe/dropped_tokens: expert choices that no rank computed. Returns {} if no experts are split.
        """
        if not self._all:
            return {}
        rows = torch.tensor([[x.arrived, x.routed] for x in self._all], dtype=torch.float64, device=device)
        most, total = rows[:, 0].clone(), rows
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        dist.all_reduce(total)
        mean = total[:, 0] / dist.get_world_size()
        dropped = (total[:, 1] - total[:, 0]).sum()
        share, lost = torch.stack([(most / mean.clamp(min=1)).max(), dropped]).tolist()
        return {"moe/rank_load_max": share, "moe/dropped_tokens": lost}
