"""An adapter that servers apply themselves gives the logprobs of the trainer."""

from typing import Any

import pytest

from tests.agreement import difference
from tests.testing import spawn
from tests.vllm import contract
from tests.vllm.faults import train_adapter
from tests.vllm.servers import cases
from tests.vllm.servers.conftest import PYTHON

pytestmark = pytest.mark.matrix


def probed(options: dict[str, Any]) -> tuple[list[float], list[list[list[float]]]]:
    """How far the answers are from the trainer under each version, and the answers."""
    backend, engine = contract.build(options)
    apart, said = [], []

    try:
        for version in range(3):
            train_adapter(backend, version)
            assert backend.push_weights(engine, version)
            completions = engine.generate(contract.PROMPTS, cases.GREEDY)
            assert {completion.policy_version for completion in completions} == {version}
            apart.append(difference(backend, contract.PROMPTS, completions))
            said.append([completion.logprobs for completion in completions])
    finally:
        engine.close()
    return apart, said


def test_servers_answer_with_the_newest_adapter(models, tmp_path):
    options = cases.options(
        models["tied"].first, rollout_server_python=PYTHON, output_dir=str(tmp_path), lora_rank=4, lora_sync="adapter",
        max_tokens_per_gpu=1024,
    )  # fmt: skip
    [(apart, said)] = spawn(1, probed, options, timeout=500)
    assert max(apart) < 1e-4
    assert said[0] != said[1] != said[2]
