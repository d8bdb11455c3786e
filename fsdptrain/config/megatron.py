"""Options of --backend megatron: how megatron-core splits the model."""

from typing import Literal

from pydantic import Field

from fsdptrain.config.section import Section


class MegatronConfig(Section):
    """--backend megatron: how megatron-core splits and computes the model. docs/megatron.md."""

    tensor_parallel: int = Field(default=1, ge=1)
    """Processes that share each layer's matrices."""
    pipeline_parallel: int = Field(default=1, ge=1)
    """Pipeline stages, each with a part of the layers."""
    expert_parallel: int = Field(default=1, ge=1)
    """Processes over which the experts of a layer are distributed; each expert is whole on one process."""
    context_parallel: int = Field(default=1, ge=1)
    """Processes that share each sequence. Attention is then the transformers module, and each process computes it for
    the whole sequence."""
    sequence_parallel: bool = False
    """Split activations between a layer's matrices along the sequence, over the tensor-parallel processes."""
    moe_dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    """Transport of tokens to their experts."""
    spec: str | None = None
    """`package.module:function` that builds the layers instead of the backend: (transformer_config, hf_config, *,
    vp_stage=None) -> block spec."""
    bridge: Literal["auto", "own", "mbridge", "megatron-bridge"] = "auto"
    """Converter of weights from checkpoint files and to the engine. `own`: the built-in table, also used by `auto`. If
    the requested bridge is not installed or does not support the model, the table is used with a warning; with
    --strict, it is an error."""
