"""Options of the adapter."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from fsdptrain.config.rules import EXPORT_CHOICE, FSDP_ONLY, NEUTRAL, Excludes, Problem, Requires
from fsdptrain.config.section import Names, Section

if TYPE_CHECKING:
    from fsdptrain.config.root import Config

_NO_DROPOUT = "in reinforcement learning, which trains without dropout: remove it, or use --algorithm sft"
_MERGED = "remove it, and the adapter is merged into the weights"


class LoraConfig(Section):
    """Small adapter trained instead of the weights: docs/lora.md."""

    NAME = "lora"
    PREFIX = "lora_"
    RULES = (Requires("lora_rank", fix="set it, e.g. 32"), FSDP_ONLY)

    rank: int = Field(default=0, ge=0)
    """Rank of the adapter, e.g. 32. 0: no adapter, train all weights."""
    alpha: int = Field(default=32, ge=1)
    """Scale of the adapter's output: alpha / rank."""
    dropout: Annotated[float, Requires("algorithm=sft", reason=_NO_DROPOUT)] = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout before the adapter. Only for `--algorithm sft`; RL trains without dropout."""
    targets: Names = Field(default=["all-linear"], min_length=1)
    """Adapted weights: `all-linear` (except the head), `attention`, name suffixes of linear layers (q_proj), or of
    other weights such as experts.gate_up_proj experts.down_proj."""
    export: Annotated[Literal["adapter", "merged", "both"], NEUTRAL, EXPORT_CHOICE] = "adapter"
    """Format of the exported model. `adapter`: a peft directory. `merged`: a full model. `both`: a full model and the
    adapter in its subdirectory `adapter`."""
    sync: Annotated[
        Literal["merged", "adapter"],
        NEUTRAL,
        Requires("rollout_engine=vllm|vllm-server", fix=_MERGED),
        Excludes("rollout_urls", fix=f"use --rollout-num-servers, or {_MERGED}"),
    ] = "merged"
    """Weights that the engine receives: full weights with the adapter merged, or the adapter alone (vLLM only)."""

    @property
    def enabled(self) -> bool:
        return self.rank > 0

    @property
    def freezes_weights(self) -> bool:
        return self.enabled

    def problems(self, config: "Config") -> Iterator[Problem]:
        if not self.enabled:
            return
        reason = "with --lora-rank, whose reference is the model without the adapter: remove it"
        yield from config.without_effect(["ref_update_interval"], reason)
        if self.sync == "adapter" and config.rollout.engine == "vllm-server" and config.sync.max_staleness:
            yield (
                "--lora-sync adapter with servers does not work with --max-staleness "
                f"{config.sync.max_staleness}, where requests are in flight during a weight sync: leave one of them out"
            )
        for name in sorted({name for name in self.targets if self.targets.count(name) > 1}):
            yield f"--lora-targets names {name} twice: name it once"
