"""What needs a GPU: layers of Transformer Engine where it imports, packed rows, and the dealt optimizer over NCCL.

Written on machines without one: not run yet.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from fsdptrain.platform import device_count, has_accelerator
from fsdptrain.testing import spawn
from tests.megatron import cases, test_precision, wrapped_cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_accelerator(), reason="needs a GPU")]
two_gpus = pytest.mark.skipif(device_count() < 2, reason="needs two GPUs")


def built(folder: Path, bf16: bool) -> dict[str, Any]:
    """The backend holds a small copy against transformers before it is built: this ends with an error, or is right."""
    from fsdptrain.backends.megatron.model import has_transformer_engine

    backend = test_precision.backend_of(folder, bf16=bf16, lr=1e-3)
    files = test_precision.load_file(folder / "model.safetensors")
    streamed = {name: tensor.cpu() for name, tensor in test_precision.masters(backend).items()}
    return {
        "lines": backend.lines,
        "engine": has_transformer_engine(),
        "changed": [name for name in files if not torch.equal(streamed[name], files[name])],
        "norms": test_precision.steps(backend, 2),
    }


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3", "qwen3_next"])
def test_a_model_is_built_and_weights_come_out_bitwise(family: str, tmp_path: Path) -> None:
    save = wrapped_cases.save if family in wrapped_cases.CONFIGS else cases.save
    folder = save(family, tmp_path / "model")
    (half,), (single,) = (spawn(1, built, folder, bf16, timeout=300.0) for bf16 in (True, False))
    for found in (half, single):
        assert found["changed"] == []
        assert ("Transformer Engine layers" in found["lines"][0]) == found["engine"]
    assert half["norms"] == pytest.approx(single["norms"], rel=5e-2)


@two_gpus
@pytest.mark.parametrize(
    "layout",
    [{"expert_parallel": 2}, {"pipeline_parallel": 2}, {"tensor_parallel": 2, "sequence_parallel": True}],
    ids=str,
)
def test_steps_on_two_gpus_are_those_on_one(layout: dict[str, int], tmp_path: Path) -> None:
    folder = cases.save("qwen3_moe", tmp_path / "model")
    found = spawn(2, test_precision.train, folder, tmp_path / "two", layout, timeout=300.0)
    (alone,) = spawn(1, test_precision.train, folder, tmp_path / "one", {}, timeout=300.0)
    for rank in found:
        assert rank["files"]
        assert rank["rounded"]
    if "expert_parallel" not in layout:  # whose ranks have a pack each
        assert found[0]["norms"] == pytest.approx(alone["norms"], rel=3e-2)
