"""With vLLM in the trainer's process the verification names every fault, and notices a prefix cache that was kept."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.matrix import only
from tests.testing import spawn
from tests.vllm import contract, models
from tests.vllm.faults import FaultyTransfer, plant_faults, require_named

# name -> (bf16, tries): a hundred of dense models, and a hundred of mixtures; in `make test` each fault twice
CASES = [("tied", False, 10)]
CASES += [(name, bf16, tries) for name, tries in (("tied", 25), ("untied", 25), ("moe", 50)) for bf16 in (False, True)]


class KeepsCache:
    """vLLM, but a reset of the prefix cache does nothing."""

    def __init__(self, llm: object) -> None:
        self._llm = llm

    def __getattr__(self, name: str) -> object:
        return (lambda **_: True) if name == "reset_prefix_cache" else getattr(self._llm, name)


@contextmanager
def keep_cache(engine: Any) -> Iterator[None]:
    llm = engine._llm
    engine._llm = KeepsCache(llm)
    try:
        yield
    finally:
        engine._llm = llm


@pytest.mark.parametrize(("name", "bf16", "tries"), only(CASES[:1], CASES))
def test_each_fault_is_named(tmp_path, name, bf16, tries):
    options = contract.colocated(models.save(name, tmp_path / "model"), bf16=bf16)
    [(outcomes, differences)] = spawn(1, plant_faults, options, tries, FaultyTransfer(), keep_cache, timeout=500)
    assert len(outcomes) == tries
    require_named(outcomes, differences, bound=0.05 if bf16 else 1e-5)
