"""Options of context parallelism."""

from typing import Annotated

from pydantic import Field

from fsdptrain.config.rules import NEUTRAL, Excludes, Fact, RankGroup
from fsdptrain.config.section import Section


class ContextParallelConfig(Section):
    """Context parallelism."""

    NAME = "context_parallel"
    ON_RESUME = NEUTRAL
    FACTS = ((Fact.OWN_ATTENTION, "context_parallel_size>1"),)

    context_parallel_size: Annotated[
        int,
        RankGroup("context", shares_tokens=True),
        Excludes("image_key", "compile", "offload_activations", "layout=padded"),
        Excludes("attn_implementation=flash_attention_2|flash_attention_3", fix="use auto, varlen or sdpa"),
        Excludes("backend=megatron"),
    ] = Field(default=1, ge=1)
    """Processes over which the tokens of every pack are distributed: sequences may be that many times longer."""
