"""With vLLM too, --sync-check names the tensor that did not arrive, and sees a prefix cache that was kept."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fsdptrain.testing import spawn
from tests.distributed.test_sync_check import Courier
from tests.matrix import only
from tests.vllm import contract, models
from tests.vllm.faults import require_named, what_the_check_said

# name -> (bf16, tries): a hundred of dense models, and a hundred of mixtures; in `make test` each fault twice
CASES = [("tied", False, 10)]
CASES += [(name, bf16, tries) for name, tries in (("tied", 25), ("untied", 25), ("moe", 50)) for bf16 in (False, True)]


class KeptCache:
    """Stands for a vLLM that is not told to forget, and says that it was."""

    def __init__(self, llm: object) -> None:
        self._llm = llm

    def __getattr__(self, name: str) -> object:
        return (lambda: True) if name == "reset_prefix_cache" else getattr(self._llm, name)


@contextmanager
def keep_cache(engine: Any) -> Iterator[None]:
    llm = engine._llm
    engine._llm = KeptCache(llm)
    try:
        yield
    finally:
        engine._llm = llm


@pytest.mark.parametrize(("name", "bf16", "tries"), only(CASES[:1], CASES))
def test_each_fault_is_named(tmp_path, name, bf16, tries):
    options = contract.colocated(models.save(name, tmp_path / "model"), bf16=bf16)
    [(found, apart)] = spawn(1, what_the_check_said, options, tries, Courier(), keep_cache, timeout=500)
    assert len(found) == tries
    require_named(found, apart, bound=0.05 if bf16 else 1e-5)
