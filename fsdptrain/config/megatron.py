"""What --backend megatron is told besides: how megatron-core splits the model."""

from typing import Literal

from pydantic import Field

from fsdptrain.config.section import Section


class MegatronConfig(Section):
    """--backend megatron: how megatron-core splits and computes the model. docs/megatron.md."""

    tensor_parallel: int = Field(default=1, ge=1)
    """Processes that share each layer's matrices."""
    pipeline_parallel: int = Field(default=1, ge=1)
    """Stages, each with its part of the layers."""
    expert_parallel: int = Field(default=1, ge=1)
    """Processes over which the experts of a layer are dealt; each is whole on one of them."""
    context_parallel: int = Field(default=1, ge=1)
    """Processes that share each sequence. Attention is then the module of transformers, which each computes whole."""
    sequence_parallel: bool = False
    """Split what lies between a layer's matrices along the sequence, over the tensor-parallel processes."""
    moe_dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    """How tokens reach their experts."""
    spec: str | None = None
    """`package.module:function` that builds the layers in place of the backend's own: (transformer_config, hf_config,
    *, vp_stage=None) -> block spec."""
    bridge: Literal["auto", "own", "mbridge", "megatron-bridge"] = "auto"
    """Who converts weights on their way from the files and to the engine. `own`: this program's table, which is what
    `auto` means. Where the other that is asked for is not installed, or does not know the model, the table does it: a
    warning with the reasons, and with --strict an error."""
