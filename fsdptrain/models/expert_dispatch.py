"""Tokens on their way to split experts: transformers' all-to-all, and how evenly they arrive."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.distributed.expert_parallel import AllToAllEP, EPImplementationInterface

from fsdptrain.types import Metrics

NAME = "fsdptrain"


class CountedDispatch(AllToAllEP):
    """Of one module of experts. No token is dropped: ranks get as many rows as are sent to them."""

    def __init__(self, experts: nn.Module, *meshes: Any) -> None:
        super().__init__(experts, *meshes)
        self.routed = 0.0  # rows that routers here have chosen experts for; of a tensor group each rank has a share
        self.arrived = 0  # rows that experts here have computed
        setattr(experts, NAME, self)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        self.routed += top_k_index.numel() / self.tp_mesh.size()
        output = super().__call__(hidden_states, top_k_index, top_k_weights)
        # FSDP hangs its hook on the output, and a view would lose it to an operation in place
        return output.clone() if self.tp_mesh.size() > 1 else output

    def _dispatch_tokens(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        found = super()._dispatch_tokens(hidden_states, top_k_index, top_k_weights)
        self.arrived += sum(found[3].recv_sizes)  # on the host already
        return found


def register_dispatch() -> str:
    """The name by which `apply_expert_parallelism` finds it."""
    EPImplementationInterface.register(NAME, CountedDispatch)
    return NAME


class Dispatches:
    """Those of one model."""

    def __init__(self, model: nn.Module) -> None:
        found = (vars(module).get(NAME) for module in model.modules())
        self._all: Sequence[CountedDispatch] = [x for x in found if isinstance(x, CountedDispatch)]

    def reset(self) -> None:
        for dispatch in self._all:
            dispatch.routed, dispatch.arrived = 0.0, 0

    def metrics(self, device: torch.device) -> Metrics:
        """Since `reset`, padding and recomputation counted; of all ranks, and collective. {} where nothing is split.

        moe/rank_load_max: rows of the rank that got most in any layer, 1 where all get as many. moe/dropped_tokens:
        choices of experts that none has computed.
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
