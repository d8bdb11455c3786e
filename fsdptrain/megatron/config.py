"""Options of --backend megatron. Imports no megatron-core."""

from typing import Annotated

from pydantic import Field

from fsdptrain.config.rules import NEUTRAL, REFUSED, RUNS_CODE, Excludes, Requires
from fsdptrain.config.section import RankGroup, Section

_TRUNCATED = "with --rollout-top-p, --rollout-top-k and --rollout-min-p: leave one of them out"


class MegatronConfig(Section):
    """--backend megatron: how megatron-core splits and computes the model. docs/megatron.md."""

    NAME = "megatron"
    PREFIX = "megatron_"
    ON_RESUME = NEUTRAL
    RULES = (Requires("backend=megatron"),)

    tensor_parallel: Annotated[int, Excludes("@is_truncated", reason=_TRUNCATED)] = Field(default=1, ge=1)
    """Processes that share each layer's matrices, and the tokens of the activations between them."""
    pipeline_parallel: int = Field(default=1, ge=1)
    """Pipeline stages, each with a part of the layers."""
    expert_parallel: int = Field(default=1, ge=1)
    """Processes over which the experts of a layer are distributed; each expert is whole on one process."""
    spec: Annotated[str | None, REFUSED, RUNS_CODE] = None
    """`package.module:function` that builds the layers instead of the backend: (transformer_config, hf_config, *,
    vp_stage=None) -> block spec."""

    @property
    def rank_groups(self) -> tuple[RankGroup, ...]:
        replica = self.tensor_parallel * self.pipeline_parallel
        return (
            RankGroup("tensor", "megatron_tensor_parallel", self.tensor_parallel),
            RankGroup("stages", "megatron_pipeline_parallel", self.pipeline_parallel),
            RankGroup("experts", "megatron_expert_parallel", self.expert_parallel, shares_packs=False, stride=replica),
        )


SECTIONS = (MegatronConfig,)
