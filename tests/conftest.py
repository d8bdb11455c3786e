"""Configuration of all tests.

Ranks and commands are forked from one server, which `tests.preloaded` prepares. Hypothesis has no deadlines, which fail
on a busy machine, and the same examples in each run.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.matrix import REAL_MODEL
from tests.testing import PRELOAD, machine_lock, save_tiny_checkpoint

os.environ.setdefault(PRELOAD, "tests.preloaded")
settings.register_profile("fsdptrain", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("fsdptrain")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny Qwen3 with its tokenizer, as a hub folder."""
    return save_tiny_checkpoint(tmp_path_factory.mktemp("hub") / "tiny")


@pytest.fixture
def real_model() -> Iterator[Path]:
    """SmolLM2-135M-Instruct. Its tests take up to 9 GiB, so they run one at a time."""
    if not REAL_MODEL.exists():
        pytest.skip("`make smollm2` makes the model")
    with machine_lock():
        yield REAL_MODEL
