"""Base class of configuration sections: frozen, strict, documented by the strings under the fields."""

from typing import Annotated

import pydantic
from pydantic import BaseModel, BeforeValidator


class Section(BaseModel):
    model_config = pydantic.ConfigDict(
        strict=True, frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )


Names = Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
