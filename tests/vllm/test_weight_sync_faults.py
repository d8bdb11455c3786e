"""With vLLM in the trainer's process the verification names every fault."""

import pytest

from tests.matrix import only
from tests.testing import spawn
from tests.vllm import contract, models
from tests.vllm.faults import FaultyTransfer, plant_faults, require_named

# name -> (bf16, tries): a hundred of dense models, and a hundred of mixtures; in `make test` each fault twice
CASES = [("tied", False, 10)]
CASES += [(name, bf16, tries) for name, tries in (("tied", 25), ("untied", 25), ("moe", 50)) for bf16 in (False, True)]


@pytest.mark.parametrize(("name", "bf16", "tries"), only(CASES[:1], CASES))
def test_each_fault_is_named(tmp_path, name, bf16, tries):
    options = contract.colocated(models.save(name, tmp_path / "model"), bf16=bf16)
    [outcomes] = spawn(1, plant_faults, options, tries, FaultyTransfer(), timeout=500)
    assert len(outcomes) == tries
    require_named(outcomes)
