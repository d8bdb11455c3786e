"""Option of torch.compile."""

from typing import Annotated

from pydantic import Field

from fsdptrain.config.rules import FSDP_ONLY, NEUTRAL, IdleWith, Requires
from fsdptrain.config.section import Section


class CompileConfig(Section):
    """torch.compile."""

    NAME = "compile"
    ON_RESUME = NEUTRAL

    compile: Annotated[bool, FSDP_ONLY] = False
    """Apply torch.compile to each decoder layer, except attention, once for packs of all shapes. Needs a C++
    compiler."""
    activation_memory_budget: Annotated[
        float,
        Requires("compile"),
        IdleWith("gradient_checkpointing", fix="remove one of them: checkpointing recomputes whole layers"),
    ] = Field(default=1.0, ge=0.0, le=1.0)
    """Part of the activations that compiled layers keep for the backward pass; they recompute the rest, cheapest
    operations first. 1 keeps what is fastest, 0 as little as possible. Not run on a GPU yet."""
