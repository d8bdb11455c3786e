"""What a refusal is: one line that names what is wrong, and nothing of it where it is repaired."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from fsdptrain.config import Config
from fsdptrain.errors import ConfigError

SFT = {"algorithm": "sft"}


def assert_refused(values: Mapping[str, Any], named: Sequence[str], repair: Mapping[str, Any] | None = None) -> None:
    """named: parts of the line. repair: what makes `values` work; None: nothing short does."""
    values = {"hf_checkpoint": "x", **values}
    with pytest.raises(ConfigError) as caught:
        Config(**values)
    line = str(caught.value)
    assert "\n" not in line
    assert [part for part in named if part not in line] == []
    if repair is not None:
        Config(**{**values, **repair})
