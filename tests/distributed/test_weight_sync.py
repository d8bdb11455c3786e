"""Faults in a weight sync to the embedded engine are named; tests/vllm plants the same faults for vLLM."""

from pathlib import Path

import pytest

from tests import zoo
from tests.matrix import only
from tests.testing import spawn, tiny_tokenizer
from tests.vllm import contract
from tests.vllm.faults import FaultyTransfer, plant_faults, require_named

CASES = [("qwen3", True, 10), ("qwen3_moe", False, 10)]
CASES += [(name, bf16, 50) for name in ("qwen3", "qwen3_moe") for bf16 in (False, True)]


@pytest.mark.parametrize(("name", "bf16", "tries"), only(CASES[:2], CASES))
def test_the_verification_names_each_fault(tmp_path: Path, name: str, bf16: bool, tries: int) -> None:
    zoo.build(name).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    options = {**contract.OPTIONS, "hf_checkpoint": str(tmp_path), "bf16": bf16, "rollout_engine": "hf"}
    [outcomes] = spawn(1, plant_faults, options, tries, FaultyTransfer(), timeout=300)
    assert len(outcomes) == tries
    require_named(outcomes)
