"""Configuration of all tests.

Ranks and commands are forked from one server, which `tests.preloaded` prepares. Hypothesis has no deadlines, which fail
on a busy machine, and the same examples in each run.
"""

import os

from hypothesis import settings

from tests.testing import PRELOAD

os.environ.setdefault(PRELOAD, "tests.preloaded")
settings.register_profile("fsdptrain", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("fsdptrain")
