"""pytest plugin of `make test-oldest`: skips, with reasons, what needs more than the oldest versions."""

from collections.abc import Mapping, Sequence

import pytest

_PLANS = "transformers 5.17 has no plans to split a model; fsdptrain says so in one line"
_IMAGES = "with transformers 5.17, images cannot be encoded outside the forward; fsdptrain says so in one line"
_FAMILIES = "transformers 5.17 does not have these families"
_NUMPY = "the interpreter of triton 3.6 does not work with numpy 2.4"

NEEDS_MORE = {  # beginnings of test names
    "tests/features/model_parallel/": _PLANS,
    "tests/distributed/test_memory_plan.py::test_the_estimate_is_near_what_a_step_takes[experts": _PLANS,
    "tests/distributed/test_parallel.py": _PLANS,
    "tests/distributed/test_vision.py": _IMAGES,
    "tests/features/vision/": _IMAGES,
    "tests/features/context_parallel/test_checks.py::test_a_model_that_does_not_allow_it": _FAMILIES,
    "tests/features/liger/test_liger.py::test_the_kernels_compute_what_the_modules_do": _NUMPY,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip_by_name(items, NEEDS_MORE)


def skip_by_name(items: Sequence[pytest.Item], reasons: Mapping[str, str]) -> None:
    """Skip the tests whose names begin with a key of `reasons`."""
    for item in items:
        for begin, reason in reasons.items():
            if item.nodeid.startswith(begin):
                item.add_marker(pytest.mark.skip(reason=reason))
