"""The process groups of megatron-core. They belong to the process, as it wants them: one split at a time."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast

import torch.distributed as dist
from torch import nn

from fsdptrain import platform
from fsdptrain.config.megatron import MegatronConfig
from fsdptrain.megatron.cpu_shims import ignore_older_names, quiet_megatron


@dataclass(frozen=True)
class Groups:
    """Of this rank."""

    tensor: dist.ProcessGroup
    stage: dist.ProcessGroup  # of the pipeline
    context: dist.ProcessGroup  # ranks with other tokens of the same packs
    expert: dist.ProcessGroup
    data: dist.ProcessGroup  # ranks with other tokens, and the same part of what is not an expert
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
        """Ranks that update the same numbers of `parameter`, by what megatron-core has marked it with; 0 for a copy
        that ties the head to the embedding of another stage."""
        marks = vars(parameter)
        if marks.get("shared", False):
            return 0
        whole = marks.get("allreduce", True) and not marks.get("tensor_model_parallel", False)  # nor is an expert
        return self.tensor.size() if whole else 1

    def copies(self, parameter: nn.Parameter) -> int:
        """Ranks that hold these numbers of `parameter`: its owners, times those over which each deals them."""
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


# The fastest first. Ranks that share packs (tensor, stage, context) are neighbours, as under FSDP; stages come before
# context, so that those of attention, which counts context, and of experts, which does not, are the same ranks.
_ORDER = "tp-pp-cp-ep-dp"


def start_groups(megatron: MegatronConfig, *, timeout_s: float) -> None:
    """megatron-core's process groups over all ranks, in `_ORDER`.

    Collective. Those of an earlier run of this process end, whose ranks may have gone.
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
            create_gloo_process_groups=False,  # a second time, for checkpoints and an optimizer that are not used
        )
    with platform.random_states_kept():  # its own generators, which nothing here draws from; and torch's, by the way
        tensor_parallel.model_parallel_cuda_manual_seed(1234)


@contextmanager
def _ranks_in_order(parallel_state: Any) -> Iterator[None]:
    """Number ranks by `_ORDER`, which megatron-core takes only for one data-parallel size of attention and experts.

    That refusal looks at the name of the order alone. What it is to keep apart, other stages for experts than for
    attention, the next line of megatron-core compares by the ranks themselves, and that check stays.
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
    """End them, so that another model of this process may be split otherwise."""
    from megatron.core import parallel_state

    made: Any = parallel_state._global_process_group_list or [None]  # megatron-core itself only forgets them
    for group in made[1:]:  # the first stands for all ranks
        with suppress(ValueError):  # it ended with the group of all ranks, of an earlier run
            dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()
