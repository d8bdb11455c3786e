"""Configuration of all tests.

Ranks and commands are forked from one server, which `tests.preloaded` prepares. Hypothesis has no deadlines, which fail
on a busy machine, and the same examples in each run.
"""

import os
from pathlib import Path

import pytest
from hypothesis import settings

from tests.testing import PRELOAD, save_tiny_checkpoint

os.environ.setdefault(PRELOAD, "tests.preloaded")
settings.register_profile("fsdptrain", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("fsdptrain")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny Qwen3 with its tokenizer, as a hub folder."""
    return save_tiny_checkpoint(tmp_path_factory.mktemp("hub") / "tiny")
