"""Options that trade time for the memory of activations."""

from typing import Annotated

from fsdptrain.config.rules import FSDP_ONLY, NEUTRAL, Requires
from fsdptrain.config.section import Section


class ActivationMemoryConfig(Section):
    """Memory of activations."""

    NAME = "activation_memory"
    ON_RESUME = NEUTRAL

    gradient_checkpointing: bool = False
    """Recompute each decoder layer in the backward pass: less memory, about a third more time."""
    offload_activations: Annotated[bool, Requires("gradient_checkpointing"), FSDP_ONLY] = False
    """Keep the inputs of decoder layers, all that --gradient-checkpointing saves, in host memory."""
