"""With servers the verification names every fault and the server."""

from pathlib import Path

import pytest

from tests.testing import spawn
from tests.vllm.faults import FaultyTransfer, plant_faults, require_named
from tests.vllm.servers import cases

pytestmark = pytest.mark.matrix
# A hundred faults of dense models and of mixtures of experts.
CASES = [("tied", 50), ("untied", 50), ("moe", 100)]
_FUSED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", ".experts.")


def is_part_of_a_layer(name: str) -> bool:
    """A server itself refuses an update that lacks the only tensor of a layer."""
    return any(part in name for part in _FUSED)


@pytest.mark.parametrize(("name", "tries"), CASES)
def test_each_fault_is_named(models, urls, tmp_path: Path, name: str, tries: int) -> None:
    options = cases.attached(models[name].first, urls[name], output_dir=str(tmp_path), max_tokens_per_gpu=1024)
    transfer = FaultyTransfer(droppable=is_part_of_a_layer)
    [outcomes] = spawn(1, plant_faults, options, tries, transfer, timeout=500)
    assert len(outcomes) == tries
    require_named(outcomes, replica=urls[name])
