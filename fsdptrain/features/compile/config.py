"""Option of torch.compile."""

from typing import Annotated

from fsdptrain.config.rules import FSDP_ONLY, NEUTRAL
from fsdptrain.config.section import Section


class CompileConfig(Section):
    """torch.compile."""

    NAME = "compile"
    ON_RESUME = NEUTRAL

    compile: Annotated[bool, FSDP_ONLY] = False
    """Apply torch.compile to each decoder layer, except attention, once for packs of all shapes. Needs a C++
    compiler."""
