"""After a push the engine answers, bit by bit, as one that was just started on the new weights.

Its logprobs are compared with those of the trainer in test_colocated.py. All engines of a kind live in one process, one
after the other: what is slow is to import vLLM.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from fsdptrain.fsdp.backend import FSDPBackend
from fsdptrain.types import SamplingParams
from tests.matrix import chosen, only
from tests.testing import spawn
from tests.vllm import contract, models
from tests.vllm.faults import train_a_little, train_adapter
from tests.vllm.fresh_engine import MAX_TOKENS, Answers, Start, fresh_answers

GREEDY = SamplingParams(num_samples=1, max_tokens=MAX_TOKENS, temperature=0.0)
LORA = {"lora_rank": 4, "lora_rslora": True, "lora_modules_to_save": ["lm_head"], "rollout_temperature": 1.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"{model} {name}": (model, {"bf16": bf16})
        for model in models.NAMES
        for name, bf16 in (("fp32", False), ("bf16", True))
    },
    "merged fp32": ("tied", {"bf16": False, **LORA}),
    "merged bf16": ("untied", {"bf16": True, **LORA}),
}
FEW = ["merged fp32"]


def pushed(folder: Path, cases: list[str]) -> dict[str, tuple[Answers, Answers]]:
    """What an engine said under each of two versions of each case. What it was given last lies in `folder`/case."""
    found = {}
    for case in cases:
        name, more = CASES[case]
        options = contract.colocated(models.save(name, folder / f"{case} first"), **more)
        backend, engine, verifier = contract.build_verified(options)
        said = []
        for version in range(2):
            if version:
                train_adapter(backend, version) if "lora_rank" in more else train_a_little(backend, version)
            engine.update_weights(verifier.record(backend.hf_weights("hub")), version)
            verifier.verify(version)
            said.append([[c.token_ids, c.logprobs] for c in engine.generate(contract.PROMPTS, GREEDY)])
        engine.close()
        keep(backend, folder / case)
        found[case] = (said[0], said[1])
    return found


def keep(backend: FSDPBackend, target: Path) -> None:
    """Write what was handed over as a checkpoint."""
    target.mkdir()
    tensors = {name: tensor.contiguous() for name, tensor in backend.hf_weights("hub")}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(backend.checkpoint_path / "config.json", target)


@pytest.fixture(scope="module")
def found(request, tmp_path_factory) -> tuple[dict[str, tuple[Answers, Answers]], dict[str, Answers]]:
    """What engines said after pushes, and what fresh ones said: of the cases of this session."""
    folder = tmp_path_factory.mktemp("pushed")
    cases = chosen(request, "case")
    [after] = spawn(1, pushed, folder, cases, timeout=600)
    starts = {case: Start(str(folder / case), "bfloat16" if CASES[case][1]["bf16"] else "float32") for case in cases}
    return after, fresh_answers(sys.executable, starts, [p.token_ids for p in contract.PROMPTS])


@pytest.mark.parametrize("case", only(FEW, CASES))
def test_after_a_push_an_engine_equals_one_that_starts_with_the_weights(found, case):
    after, fresh = found
    first, second = after[case]
    assert first != second
    assert second == fresh[case]
