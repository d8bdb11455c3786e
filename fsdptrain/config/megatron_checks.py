"""Checks of --backend megatron. Flags that it would ignore are errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fsdptrain.config.effects import Problem, changed, without_effect
from fsdptrain.config.keys import SECTIONS, all_keys
from fsdptrain.errors import ConfigError

if TYPE_CHECKING:
    from fsdptrain.config.root import Config

OWN_SPLITS = {
    "tensor_parallel_size": "--megatron-tensor-parallel",
    "expert_parallel_size": "--megatron-expert-parallel",
    "context_parallel_size": "--megatron-context-parallel",
}
ONLY_FSDP = (
    "lora_rank image_key train_vision load_strategy attn_implementation layout fp16 compile offload_activations "
    "gradient_checkpointing_kind gradient_checkpointing_every offload_optimizer offload_optimizer_step async_save "
    "router_aux_loss_coef router_replay router_bias_update_rate prefix_sharing context_parallel_recurrent probe "
    "offload_train"
)


def check_megatron(config: Config) -> Iterator[Problem]:
    if config.parallel.backend == "fsdp":
        keys = " ".join(f"megatron_{name}" for name in SECTIONS["megatron"].model_fields)
        yield from without_effect(config, keys, "without --backend megatron: add it, or leave this out")
        return
    for key in changed(config, *OWN_SPLITS):
        yield f"{all_keys()[key].flag} is of --backend fsdp: use {OWN_SPLITS[key]}"
    for key in changed(config, *(f"fsdp_{name}" for name in SECTIONS["fsdp"].model_fields), *ONLY_FSDP.split()):
        yield f"{all_keys()[key].flag} is of --backend fsdp, which --backend megatron does not do: leave it out"
    yield from _not_built(config)


def _not_built(config: Config) -> Iterator[Problem]:
    split = config.megatron
    if split.sequence_parallel and split.tensor_parallel == 1:
        yield "--megatron-sequence-parallel needs --megatron-tensor-parallel above 1, over whose processes it splits"
    if (split.context_parallel > 1 or split.sequence_parallel) and split.moe_dispatcher == "allgather":
        yield (
            "--megatron-moe-dispatcher allgather does not work with --megatron-context-parallel or "
            "--megatron-sequence-parallel: use alltoall"
        )
    if split.pipeline_parallel > 1 and split.moe_dispatcher == "allgather":
        yield "--megatron-moe-dispatcher allgather does not work with --megatron-pipeline-parallel: use alltoall"
    if config.is_truncated and split.tensor_parallel > 1:
        yield (
            "--rollout-top-p, --rollout-top-k and --rollout-min-p do not work with --megatron-tensor-parallel yet: "
            "leave one of them out"
        )


def check_megatron_world(config: Config, world_size: int) -> None:
    """Raise ConfigError if the number of processes does not fit."""
    split, copies = config.megatron, config.pack_copies
    if world_size % copies:
        raise ConfigError(
            f"--megatron-tensor-parallel {split.tensor_parallel} x --megatron-context-parallel "
            f"{split.context_parallel} x --megatron-pipeline-parallel {split.pipeline_parallel} must divide the number "
            f"of processes, {world_size}"
        )
    of_stage = world_size // split.pipeline_parallel
    if of_stage % (split.tensor_parallel * split.expert_parallel):
        raise ConfigError(
            f"--megatron-expert-parallel {split.expert_parallel} x --megatron-tensor-parallel {split.tensor_parallel} "
            f"must divide the processes of a stage, {of_stage}"
        )
