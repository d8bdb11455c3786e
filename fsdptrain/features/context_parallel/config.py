"""Options of context parallelism."""

from typing import Annotated, Literal

from pydantic import Field

from fsdptrain.config.rules import FSDP_ONLY, NEUTRAL, Excludes, Requires
from fsdptrain.config.section import RankGroup, Section


class ContextParallelConfig(Section):
    """Context parallelism."""

    NAME = "context_parallel"
    ON_RESUME = NEUTRAL

    context_parallel_size: Annotated[
        int,
        Excludes("image_key", "compile", "gradient_checkpointing_kind=selective", "offload_activations"),
        Excludes("attn_implementation=flash_attention_2|flash_attention_3", fix="use auto, varlen or sdpa"),
        Excludes("backend=megatron", fix="use --megatron-context-parallel"),
    ] = Field(default=1, ge=1)
    """Processes over which the tokens of every pack are distributed: sequences may be that many times longer."""
    context_parallel_recurrent: Annotated[
        Literal["refuse", "gather"], Requires("context_parallel_size>1"), FSDP_ONLY
    ] = "refuse"
    """With --context-parallel-size: handling of stateful mixers (Mamba, Gated DeltaNet, convolutions). `refuse`: an
    error. `gather`: each process of a group computes them for all tokens of the group."""

    @property
    def enabled(self) -> bool:
        return self.context_parallel_size > 1

    @property
    def rank_groups(self) -> tuple[RankGroup, ...]:
        return (RankGroup("context", "context_parallel_size", self.context_parallel_size, shares_tokens=True),)

    @property
    def needs_own_attention(self) -> bool:
        return self.enabled
