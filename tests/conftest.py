"""Ranks and commands of all tests are forked from one server, which `tests.preloaded` prepares."""

import os

from tests.testing import PRELOAD

os.environ.setdefault(PRELOAD, "tests.preloaded")
