"""These tests hold vLLM and the trainer in one process: `make test-vllm` runs them, in an environment with vLLM."""

import importlib.util
import os

import pytest

from tests.testing import PRELOAD

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ[PRELOAD] = "tests.vllm.preloaded"


def pytest_collection_modifyitems(items) -> None:
    for item in items:
        if item.path.parent.name == "vllm":
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # vLLM's own
