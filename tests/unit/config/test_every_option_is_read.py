"""No option is accepted and ignored: whatever is declared is read outside of the declaration."""

import re
from pathlib import Path

import pytest

from fsdptrain.config.keys import all_keys

PACKAGE = Path(__file__).parents[3] / "fsdptrain"
ONE_CHOICE = {"optimizer"}  # adam is all there is: nobody needs to ask
READERS = [path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE / "config" or path.name == "root.py"]
CODE = "\n".join(path.read_text(encoding="utf-8") for path in READERS)


@pytest.mark.parametrize("flat", sorted(set(all_keys()) - ONE_CHOICE))
def test_the_option_is_read(flat):
    key = all_keys()[flat]
    pattern = (
        rf"\b{key.section}\.{key.name}\b|\b_?(?:config|data|rollout|launch|run|log|model|info|algorithm)\.{key.name}\b"
    )
    assert re.search(pattern, CODE), f"{key.flag} is read nowhere"
