"""Base class of configuration sections: frozen, strict, documented by the strings under the fields.

The core knows its own sections (`keys.CORE_SECTIONS`). Optional folders and plug-ins add sections for their options,
and tell the core by `FACTS` and by marks of fields what these options change.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar

import pydantic
from pydantic import BaseModel, BeforeValidator

from fsdptrain.config.rules import Fact, OnResume, Problem, Rule

if TYPE_CHECKING:
    from fsdptrain.config.root import Config

STRICT = pydantic.ConfigDict(
    strict=True, frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
)


class Section(BaseModel):
    """Options that belong together. A subclass sets `NAME`; each field is an option."""

    model_config = STRICT

    NAME: ClassVar[str] = ""  # key of the section in recipes
    PREFIX: ClassVar[str] = ""  # before its flat keys, e.g. "lora_"
    RULES: ClassVar[tuple[Rule, ...]] = ()  # rules of all its fields
    ON_RESUME: ClassVar[OnResume] = OnResume.REFUSED  # of its fields without a mark
    FACTS: ClassVar[tuple[tuple[Fact, str], ...]] = ()  # what its options change elsewhere, and a condition for it

    def problems(self, config: "Config") -> Iterator[Problem]:
        """Yield one line for each invalid combination that rules of fields cannot state."""
        return iter(())

    def launch_problems(self, world_size: int, local_world_size: int) -> Iterator[str]:
        """Yield one line for each option that does not work with this number of ranks, in all and per node."""
        return iter(())


Names = Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value or [])]
