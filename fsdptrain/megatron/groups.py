"""Process groups of megatron-core. They are global to the process: one set of parallel sizes at a time."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast

import torch.distributed as dist
from torch import nn

from fsdptrain import platform
from fsdptrain.megatron.config import MegatronConfig
from fsdptrain.megatron.cpu_shims import ignore_older_names, quiet_megatron


@dataclass(frozen=True)
class Groups:
    """The process groups of this rank."""

    tensor: dist.ProcessGroup
    stage: dist.ProcessGroup  # pipeline parallel
    context: dist.ProcessGroup  # ranks with other tokens of the same packs
    expert: dist.ProcessGroup
    data: dist.ProcessGroup  # ranks with other tokens and the same shard of non-expert parameters
    expert_data: dist.ProcessGroup  # ranks with the same experts

    @classmethod
    def present(cls) -> "Groups":
        from megatron.core import parallel_state as ps

        found = (
            ps.get_tensor_model_parallel_group(),
            ps.get_pipeline_model_parallel_group(),
            ps.get_context_parallel_group(),
            ps.get_expert_model_parallel_group(),
            ps.get_data_parallel_group(with_context_parallel=True),
            ps.get_expert_data_parallel_group(),
        )
        return cls(*(cast(dist.ProcessGroup, group) for group in found))

    def owners(self, parameter: nn.Parameter) -> int:
        """Return the number of tensor-parallel ranks that update the same values of `parameter`.

        Uses the attributes set by megatron-core. Returns 0 for the copy of the embedding that a tied head has on
        another stage.
        """
        marks = vars(parameter)
        if marks.get("shared", False):
            return 0
        whole = marks.get("allreduce", True) and not marks.get("tensor_model_parallel", False)  # experts: no all-reduce
        return self.tensor.size() if whole else 1

    def copies(self, parameter: nn.Parameter) -> int:
        """Return the number of ranks that hold the same values of `parameter`.

        These are its owners, times the data-parallel ranks over which each owner shards it (for experts,
        `expert_data`).
        """
        is_expert = not vars(parameter).get("allreduce", True)
        return self.owners(parameter) * (self.expert_data if is_expert else self.data).size()

    @property
    def line(self) -> str:
        sizes = {
            "tensor": self.tensor,
            "pipeline": self.stage,
            "context": self.context,
            "expert": self.expert,
            "data": self.data,
        }
        words = ", ".join(f"{name} {group.size()}" for name, group in sizes.items())
        return f"{dist.get_world_size()} ranks: {words}"


# Innermost (fastest) dimension first. Ranks that share packs (tensor, stage, context) are adjacent, as under FSDP.
# Stages come before context, so that attention, which counts context ranks, and experts, which do not, have the same
# stages.
_ORDER = "tp-pp-cp-ep-dp"


def start_groups(megatron: MegatronConfig, *, timeout_s: float) -> None:
    """Create megatron-core's process groups over all ranks, in `_ORDER`. Collective.

    Destroys the groups of an earlier run in this process, whose ranks may no longer exist.
    """
    with quiet_megatron():
        from megatron.core import parallel_state, tensor_parallel

    ignore_older_names()
    if parallel_state.is_initialized():
        stop_groups()
    with _ranks_in_order(parallel_state):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=megatron.tensor_parallel,
            pipeline_model_parallel_size=megatron.pipeline_parallel,
            context_parallel_size=megatron.context_parallel,
            expert_model_parallel_size=megatron.expert_parallel,
            expert_tensor_parallel_size=megatron.tensor_parallel,
            distributed_timeout_minutes=math.ceil(timeout_s / 60),
            create_gloo_process_groups=False,  # duplicates for checkpoints and an optimizer that are not used
        )
    with platform.random_states_kept():  # keep torch's RNG state; megatron-core's own generators are unused here
        tensor_parallel.model_parallel_cuda_manual_seed(1234)


@contextmanager
def _ranks_in_order(parallel_state: Any) -> Iterator[None]:
    """Make megatron-core number ranks by `_ORDER`.

    megatron-core accepts this order only if attention and experts have the same data-parallel size. That check looks
    only at the name of the order. Its purpose is to ensure that attention and experts have the same stages;
    megatron-core checks this again by comparing the ranks, and that check remains active.
    """
    original = parallel_state.RankGenerator

    def in_order(**sizes: Any) -> Any:
        return original(**sizes | {"order": _ORDER})

    parallel_state.RankGenerator = in_order
    try:
        yield
    finally:
        parallel_state.RankGenerator = original


def stop_groups() -> None:
    """Destroy the groups, so that the process can build a model with other parallel sizes."""
    from megatron.core import parallel_state

    made: Any = parallel_state._global_process_group_list or [None]  # megatron-core drops them without destroying them
    for group in made[1:]:  # the first is the group of all ranks
        with suppress(ValueError):  # already destroyed with the group of all ranks of an earlier run
            dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()
