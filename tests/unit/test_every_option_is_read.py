"""No option is accepted and ignored: each one is read outside of its declaration."""

import re
from pathlib import Path

import fsdptrain
from fsdptrain.config.keys import all_keys
from fsdptrain.config.rules import Condition, RankGroup
from fsdptrain.features import FEATURES

PACKAGE = Path(fsdptrain.__file__).parent
OF_CONFIG = ("root.py", "algorithm.py")  # whose properties combine options


def test_every_option_is_read() -> None:
    readers = [path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE / "config" or path.name in OF_CONFIG]
    code = "\n".join(path.read_text(encoding="utf-8") for path in readers)
    read = set(re.findall(r"(?<!torch)\.([a-z_0-9]+)\b(?!\()", code))
    read |= {Condition.parse(text).key for entry in FEATURES for text in entry.conditions}
    unread = {flat for flat, key in all_keys().items() if key.name not in read and flat not in read}
    assert not {flat for flat in unread if not all_keys()[flat].marks(RankGroup)}  # `Config.rank_groups` reads these
