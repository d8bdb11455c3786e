"""Process groups of megatron-core. They are global to the process: one set of parallel sizes at a time."""

import math
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from fsdptrain.megatron.config import MegatronConfig
from fsdptrain.megatron.cpu_shims import ignore_older_names, quiet_megatron
from fsdptrain.random_state import preserve_rng_state

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection


def process_groups() -> "ProcessGroupCollection":
    """Return the process groups of this rank.

    tp, pp, ep: tensor, pipeline and expert parallel. dp_cp: ranks with other tokens and the same shard of non-expert
    parameters. expt_dp: ranks with the same experts.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection

    return ProcessGroupCollection.use_mpu_process_groups(["tp", "pp", "ep", "dp_cp", "expt_dp"])


def owners(parameter: nn.Parameter, groups: "ProcessGroupCollection") -> int:
    """Return the number of tensor-parallel ranks that update the same values of `parameter`.

    Uses the attributes set by megatron-core. Returns 0 for the copy of the embedding that a tied head has on another
    stage.
    """
    marks = vars(parameter)
    if marks.get("shared", False):
        return 0
    whole = marks.get("allreduce", True) and not marks.get("tensor_model_parallel", False)  # experts: no all-reduce
    return groups.tp.size() if whole else 1


# Innermost (fastest) dimension first. Ranks that share packs (tensor, stage) are adjacent, as under FSDP.
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
    # megatron-core accepts this order only if attention and experts have the same data-parallel size. That check looks
    # only at the name of the order. Its purpose is to ensure that attention and experts have the same stages;
    # megatron-core checks this again by comparing the ranks, and that check remains active.
    original: Any = parallel_state.RankGenerator
    parallel_state.RankGenerator = lambda **sizes: original(**sizes | {"order": _ORDER})
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=megatron.tensor_parallel,
            pipeline_model_parallel_size=megatron.pipeline_parallel,
            virtual_pipeline_model_parallel_size=megatron.virtual_pipeline,
            expert_model_parallel_size=megatron.expert_parallel,
            expert_tensor_parallel_size=megatron.tensor_parallel,
            distributed_timeout_minutes=math.ceil(timeout_s / 60),
            create_gloo_process_groups=False,  # duplicates for checkpoints and an optimizer that are not used
        )
    finally:
        parallel_state.RankGenerator = original
    with preserve_rng_state():  # megatron-core's own generators are unused here
        tensor_parallel.model_parallel_cuda_manual_seed(1234)


def stop_groups() -> None:
    """Destroy the groups, so that the process can build a model with other parallel sizes."""
    from megatron.core import parallel_state

    made: Any = parallel_state._global_process_group_list or [None]  # megatron-core drops them without destroying them
    for group in made[1:]:  # the first is the group of all ranks
        with suppress(ValueError):  # already destroyed with the group of all ranks of an earlier run
            dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()
