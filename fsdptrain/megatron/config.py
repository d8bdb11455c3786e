"""Options of --backend megatron. Imports no megatron-core."""

from typing import Annotated, Literal

from pydantic import Field

from fsdptrain.config.rules import EXPORT_CHOICE, NEUTRAL, NOT_EXPORTED, REFUSED, WHOLE_VOCABULARY, RankGroup, Requires
from fsdptrain.config.section import Section


class MegatronConfig(Section):
    """--backend megatron: how megatron-core splits and computes the model. docs/megatron.md."""

    NAME = "megatron"
    PREFIX = "megatron_"
    ON_RESUME = NEUTRAL
    RULES = (Requires("backend=megatron"),)

    tensor_parallel: Annotated[int, RankGroup("tensor"), WHOLE_VOCABULARY] = Field(default=1, ge=1)
    """Processes that split each layer's matrices, and the tokens of the activations between them."""
    pipeline_parallel: Annotated[int, RankGroup("stages")] = Field(default=1, ge=1)
    """Pipeline stages, each with a part of the layers."""
    first_stage_layers: Annotated[int | None, Requires("megatron_pipeline_parallel>1")] = Field(default=None, ge=1)
    """Layers of the first stage; the other stages share the rest equally. None: the same number in each."""
    last_stage_layers: Annotated[int | None, Requires("megatron_pipeline_parallel>1")] = Field(default=None, ge=1)
    """Layers of the last stage, likewise."""
    virtual_pipeline: Annotated[int | None, Requires("megatron_pipeline_parallel>1")] = Field(default=None, ge=2)
    """Parts of each stage, which take turns (interleaved schedule): stages wait less and send more. None: one."""
    expert_parallel: Annotated[int, RankGroup("experts", shares_packs=False, crosses_packs=True)] = Field(
        default=1, ge=1
    )
    """Processes that share the experts of a layer; each expert is whole on one process."""
    spec: Annotated[str | None, REFUSED, EXPORT_CHOICE, NOT_EXPORTED] = None
    """`transformers`: whole layers of transformers, as in other families than docs/megatron.md lists. Your own layers:
    `package.module:function`, (transformer_config, hf_config, *, vp_stage=None) -> block spec."""
    bridge: Literal["own", "mbridge"] = "own"
    """Table that names and converts weights: our `own`, or mbridge 0.15.1 for Llama, Qwen2, Qwen3 and Qwen3-MoE. If
    mbridge cannot be used, a warning says why and our table is used."""


SECTIONS = (MegatronConfig,)
