"""Options of the adapter."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from fsdptrain.config.rules import EXPORT_CHOICE, FSDP_ONLY, NEUTRAL, Fact, Package, Problem, Requires
from fsdptrain.config.section import Names, Section

if TYPE_CHECKING:
    from fsdptrain.config.root import Config


class LoraConfig(Section):
    """Small adapter trained instead of the weights: docs/lora.md."""

    NAME = "lora"
    PREFIX = "lora_"
    RULES = (Requires("lora_rank", fix="set it, e.g. 32"), FSDP_ONLY)
    FACTS = ((Fact.FROZEN_WEIGHTS, "lora_rank"),)

    rank: Annotated[int, Package("peft", "lora")] = Field(default=0, ge=0)
    """Rank of the adapter, e.g. 32. 0: no adapter, train all weights."""
    alpha: int = Field(default=32, ge=1)
    """Scale of the adapter's output: alpha / rank."""
    targets: Names = Field(default=["all-linear"], min_length=1)
    """Adapted weights: `all-linear` (except the head), name suffixes of linear layers (q_proj), or of other weights
    such as experts.gate_up_proj experts.down_proj."""
    export: Annotated[Literal["adapter", "merged", "both"], NEUTRAL, EXPORT_CHOICE] = "adapter"
    """Format of the exported model. `adapter`: a peft directory. `merged`: a full model. `both`: a full model and the
    adapter in its subdirectory `adapter`."""

    def problems(self, config: "Config") -> Iterator[Problem]:
        if not self.rank:
            return
        for name in sorted({name for name in self.targets if self.targets.count(name) > 1}):
            yield f"--lora-targets names {name} twice: name it once"
