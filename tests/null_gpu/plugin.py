"""pytest plugin: emulates CUDA in this process and in its ranks, and skips tests that cannot pass here, with reasons.

As a module that ranks are forked from (`tests.testing.PRELOAD`), it emulates there.
"""

import os

import pytest

from tests.null_gpu.emulate import start
from tests.oldest import skip_by_name
from tests.testing import PRELOAD

CANNOT = {  # beginnings of test names
    "tests/distributed/test_gpu.py::test_in_float32_steps_are_those_of_a_cpu[liger": "Triton's kernels",
    "tests/distributed/test_gpu.py::test_in_half_precision_steps_are_near_those_of_a_cpu[bf16, liger": "Triton",
    "tests/megatron/test_gpu.py": "needs megatron-core, and kernels of Transformer Engine or two GPUs",
    "tests/vllm/servers/test_push.py": "needs vLLM on two GPUs",
}

start()


def pytest_configure(config: pytest.Config) -> None:
    os.environ[PRELOAD] = f"{__name__} {os.environ.get(PRELOAD, 'tests.preloaded')}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skip_by_name(items, {begin: f"null GPU: {reason}" for begin, reason in CANNOT.items()})
