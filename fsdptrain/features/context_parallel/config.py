"""Options of context parallelism."""

from typing import Annotated

from pydantic import Field

from fsdptrain.config.rules import NEUTRAL, Excludes
from fsdptrain.config.section import RankGroup, Section


class ContextParallelConfig(Section):
    """Context parallelism."""

    NAME = "context_parallel"
    ON_RESUME = NEUTRAL

    context_parallel_size: Annotated[
        int,
        Excludes("image_key", "compile", "offload_activations", "layout=padded"),
        Excludes("attn_implementation=flash_attention_2|flash_attention_3", fix="use auto, varlen or sdpa"),
        Excludes("backend=megatron"),
    ] = Field(default=1, ge=1)
    """Processes over which the tokens of every pack are distributed: sequences may be that many times longer."""

    @property
    def enabled(self) -> bool:
        return self.context_parallel_size > 1

    @property
    def rank_groups(self) -> tuple[RankGroup, ...]:
        return (RankGroup("context", "context_parallel_size", self.context_parallel_size, shares_tokens=True),)

    @property
    def needs_own_attention(self) -> bool:
        return self.enabled
