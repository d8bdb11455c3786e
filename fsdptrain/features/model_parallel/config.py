"""Options of tensor and expert parallelism."""

from typing import Annotated

from pydantic import Field

from fsdptrain.config.rules import NEUTRAL, Excludes, RankGroup
from fsdptrain.config.section import Section

_NOT_TESTED = Excludes(
    "lora_rank", "image_key", "compile", "offload_activations", "fp16", "fsdp_cpu_offload", "async_save",
)  # fmt: skip
_NOT_TESTED_WITH_TENSOR = Excludes("algorithm=sft", "router_replay")
_TRUNCATED = "with --rollout-top-p, --rollout-top-k and --rollout-min-p: leave one of them out"


class ModelParallelConfig(Section):
    """Tensor and expert parallelism."""

    NAME = "model_parallel"
    ON_RESUME = NEUTRAL

    tensor_parallel_size: Annotated[
        int,
        RankGroup("tensor"),
        _NOT_TESTED,
        _NOT_TESTED_WITH_TENSOR,
        Excludes("@is_truncated", reason=_TRUNCATED),
        Excludes("backend=megatron", fix="use --megatron-tensor-parallel"),
    ] = Field(default=1, ge=1)
    """Processes that share the work of every layer, by the transformers plan of the model: neighbors, within a node."""
    expert_parallel_size: Annotated[
        int,
        RankGroup("experts", shares_packs=False),
        _NOT_TESTED,
        Excludes("backend=megatron", fix="use --megatron-expert-parallel"),
    ] = Field(default=1, ge=1)
    """Processes over which experts are distributed; tokens are sent to them."""
