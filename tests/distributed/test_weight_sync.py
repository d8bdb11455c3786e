"""Laws of a weight sync to the embedded engine; vLLM's engines are held to the same ones in tests/vllm."""

from pathlib import Path

import pytest

from fsdptrain.testing import spawn, tiny_tokenizer
from tests import zoo
from tests.vllm import contract
from tests.vllm.faults import FaultyTransfer, plant_faults, require_named

TRIES = 50  # of each dtype and model


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_the_verification_names_each_of_a_hundred_faults(tmp_path: Path, name: str, bf16: bool) -> None:
    zoo.build(name).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    options = {**contract.OPTIONS, "hf_checkpoint": str(tmp_path), "bf16": bf16, "rollout_engine": "hf"}
    [(outcomes, differences)] = spawn(1, plant_faults, options, TRIES, FaultyTransfer(), timeout=300)
    assert len(outcomes) == TRIES
    require_named(outcomes, differences, bound=0.1 if bf16 else 1e-5)
