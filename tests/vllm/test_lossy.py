"""Engines that draft tokens or compute with fewer bits: what the verification of a weight sync still proves."""

from pathlib import Path
from typing import Any

import pytest

from fsdptrain.errors import RolloutError
from fsdptrain.types import SamplingParams
from tests.agreement import difference
from tests.testing import spawn
from tests.vllm import contract, models
from tests.vllm.faults import FaultyTransfer, sync

SAMPLING = SamplingParams(num_samples=8, max_tokens=48, temperature=0.7, seed=5)


def lossy(folder: Path, args: dict[str, Any], victim: str, bf16: bool) -> tuple[float, str]:
    """The difference of the engine from the trainer, and the error after a stale tensor."""
    options = contract.colocated(folder, rollout_engine_args=args, bf16=bf16)
    backend, engine, verifier = contract.build_verified(options)
    transfer = FaultyTransfer()
    for version in range(3):
        sync(backend, engine, verifier, version, transfer)
    apart = difference(backend, contract.PROMPTS, engine.generate(contract.PROMPTS, contract.SAMPLING))
    with pytest.raises(RolloutError) as stale:
        sync(backend, engine, verifier, 3, transfer, "stale", victim)
    engine.close()
    return apart, str(stale.value)


VICTIM = "model.layers.1.mlp.up_proj.weight"


def test_of_a_quantized_engine_the_tensors_that_it_received_are_compared(tmp_path):
    """vLLM on a CPU quantizes no weights while it loads them: this method leaves the layers of a dense model alone."""
    args, folder = {"quantization": "int8_per_channel_weight_only"}, models.save("tied", tmp_path)
    [(_, stale)] = spawn(1, lossy, folder, args, VICTIM, True, timeout=300)
    assert f"does not hold {VICTIM} of version 3" in stale
