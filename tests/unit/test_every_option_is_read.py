"""No option is accepted and ignored: each one is read outside of its declaration."""

import re
from pathlib import Path

import pytest

import fsdptrain
from fsdptrain.config.keys import all_keys

PACKAGE = Path(fsdptrain.__file__).parent
ONLY_ONE_CHOICE = {"optimizer"}
READERS = [path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE / "config" or path.name == "root.py"]
CODE = "\n".join(path.read_text(encoding="utf-8") for path in READERS)


@pytest.mark.parametrize("flat", sorted(set(all_keys()) - ONLY_ONE_CHOICE))
def test_an_option_is_read(flat: str) -> None:
    key = all_keys()[flat]
    holder = rf"\b{key.section}|\b_?(?:config|data|rollout|launch|run|log|model|info|algorithm)"
    assert re.search(rf"(?:{holder})\.{key.name}\b", CODE), f"{key.flag} is read nowhere"
