from pathlib import Path

import pytest

from tests.testing import save_tiny_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny Qwen3 with its tokenizer, as a hub folder."""
    return save_tiny_checkpoint(tmp_path_factory.mktemp("hub") / "tiny")
