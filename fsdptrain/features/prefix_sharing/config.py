"""Options of prefix sharing."""

from typing import TYPE_CHECKING, Annotated, Literal

from fsdptrain.config.checks import idle_reason
from fsdptrain.config.rules import FSDP_ONLY, NEUTRAL, IdleWith
from fsdptrain.config.section import Section

if TYPE_CHECKING:
    from fsdptrain.config.root import Config

_NOT_EXACT = IdleWith(
    "algorithm=sft", "router_replay", "image_key", "tensor_parallel_size>1", "expert_parallel_size>1",
    "context_parallel_size>1", "layout=padded", "attn_implementation=flash_attention_2|flash_attention_3",
    "deterministic_mode",
)  # fmt: skip


class PrefixSharingConfig(Section):
    """Sharing of the prompt of a group."""

    NAME = "prefix_sharing"
    ON_RESUME = NEUTRAL

    prefix_sharing: Annotated[Literal["auto", "on", "off"], _NOT_EXACT, FSDP_ONLY] = "auto"
    """Compute the shared prompt of a group once per pack. `auto`: if a probe of the model proves it exact and the step
    gets cheaper, but not on GPUs, where it has not been tested. `on`: wherever prompts are equal; an error if the model
    does not support it."""

    @property
    def needs_own_attention(self) -> bool:
        return self.prefix_sharing == "on"

    def obstacle(self, config: "Config", *, on_gpu: bool = False) -> str:
        """Return why no model can share the prompts of a group under `config`, or ""."""
        if self.prefix_sharing == "off":
            return "--prefix-sharing off"
        untested = on_gpu and self.prefix_sharing == "auto"
        return idle_reason(config, "prefix_sharing") or (
            "not tested on a GPU: --prefix-sharing on turns it on" if untested else ""
        )
