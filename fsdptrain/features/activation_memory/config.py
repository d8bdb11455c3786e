"""Options that trade time for the memory of activations."""

from typing import Annotated, Literal

from fsdptrain.config.rules import FSDP_ONLY, NEUTRAL, Excludes, Requires
from fsdptrain.config.section import Section


class ActivationMemoryConfig(Section):
    """Memory of activations."""

    NAME = "activation_memory"
    ON_RESUME = NEUTRAL

    gradient_checkpointing: bool = False
    """Recompute each decoder layer in the backward pass: less memory, about a third more time."""
    gradient_checkpointing_kind: Annotated[
        Literal["full", "selective"],
        Requires("gradient_checkpointing"),
        Excludes("offload_activations", "compile", fix="use --gradient-checkpointing-kind full, or remove it"),
        FSDP_ONLY,
    ] = "full"
    """`full`: store the input of a layer. `selective`: also store results of matrix products and attention, and
    recompute cheap operations."""
    offload_activations: Annotated[bool, FSDP_ONLY] = False
    """Move activations of decoder layers to host memory until the backward pass. Best with --gradient-checkpointing."""

    @property
    def is_selective(self) -> bool:
        return self.gradient_checkpointing and self.gradient_checkpointing_kind == "selective"
