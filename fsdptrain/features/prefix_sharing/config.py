"""Option of prefix sharing."""

from typing import Annotated

from fsdptrain.config.rules import FSDP_ONLY, NEUTRAL, Fact, IdleWith
from fsdptrain.config.section import Section

_NOT_EXACT = IdleWith(
    "algorithm=sft", "router_replay", "image_key", "tensor_parallel_size>1", "expert_parallel_size>1",
    "context_parallel_size>1", "layout=padded", "attn_implementation=flash_attention_2|flash_attention_3",
    "deterministic_mode",
)  # fmt: skip


class PrefixSharingConfig(Section):
    """Sharing of the prompt of a group."""

    NAME = "prefix_sharing"
    ON_RESUME = NEUTRAL
    FACTS = ((Fact.OWN_ATTENTION, "prefix_sharing"),)

    prefix_sharing: Annotated[bool, _NOT_EXACT, FSDP_ONLY] = False
    """Compute the prompt of a group once per pack. A probe of the model at start must prove it exact. Not run on a GPU
    yet."""
