"""The exported model is the model that the run evaluated last."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fsdptrain import Trainer
from fsdptrain.types import Prompt, SamplingParams
from tests import zoo
from tests.tensors import load_files
from tests.testing import save_hub, tiny_run

ROWS = [{"prompt": f"say {i}", "label": str(i)} for i in range(16)]
PROMPTS = [Prompt(str(i), [5 + i, 7, 11], "") for i in range(4)]
ADAPTER = {"lora_rank": 4, "lora_export": "merged"}
EXPERTS = ["all-linear", "experts.gate_up_proj", "experts.down_proj"]


def parity(prompt: Any, response: str) -> float:
    del prompt
    return sum(map(ord, response)) % 2


def trainer_of(family: str, folder: Path, **values: Any) -> Trainer:
    """Of a checkpoint in bfloat16."""
    source = save_hub(zoo.build(family).bfloat16(), folder / "source")
    options = {"num_rollout": 2, "n_samples_per_prompt": 4, "lr": 1e-3, "eval_size": 2, "eval_interval": 2}
    config = tiny_run(source, folder / "run", export=True, keep_last=0, **options, **values)
    return Trainer(config, reward=parity, dataset=ROWS)


@pytest.mark.parametrize(
    ("family", "values", "bound"),
    [
        ("qwen3", {"bf16": False}, 1e-5),
        ("qwen3", {"bf16": True}, 0.05),
        ("qwen3", {"bf16": False, **ADAPTER}, 1e-5),
        ("qwen3", {"bf16": True, **ADAPTER}, 0.05),
        ("qwen3", {"bf16": False, **ADAPTER, "load_in_4bit": True}, 1e-5),
        ("qwen3_moe", {"bf16": False}, 1e-5),
        ("qwen3_moe", {"bf16": False, **ADAPTER, "lora_targets": EXPERTS}, 1e-5),
        ("deepseek_v3", {"bf16": False}, 1e-5),
    ],
)
def test_plain_transformers_gives_the_logprobs_of_the_last_engine(
    tmp_path: Path, family: str, values: dict[str, Any], bound: float
) -> None:
    with trainer_of(family, tmp_path, **values) as trainer:
        trainer.fit()
        loop = trainer._loop
        assert loop is not None
        assert loop.weight_sync is not None
        loop.weight_sync.push(loop.step, loop.phases)
        completions = loop.weight_sync.engine.generate(PROMPTS, SamplingParams(num_samples=2, max_tokens=8, seed=1))
        held = dict(loop.backend.hf_weights())
    exported = load_files(tmp_path / "run" / "hf")
    assert exported.keys() == held.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in held.items())
    assert not all(torch.equal(exported[name].bfloat16(), x) for name, x in load_files(tmp_path / "source").items())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "hf")
    for completion in completions:
        prompt = PROMPTS[int(completion.prompt_id)].token_ids
        tokens = torch.tensor([*prompt, *completion.token_ids])
        with torch.no_grad():
            logprobs = model(tokens[None]).logits[0].float().log_softmax(-1)
        found = logprobs[len(prompt) - 1 : -1].gather(1, tokens[len(prompt) :, None])[:, 0]
        assert found.tolist() == pytest.approx(completion.logprobs, abs=bound)


def test_what_rounding_to_the_dtype_of_the_source_costs_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level("INFO", logger="fsdptrain"),
        trainer_of("qwen3", tmp_path, bf16=False, export_dtype="source") as trainer,
    ):
        trainer.fit()
        loop = trainer._loop
        assert loop is not None
        held = dict(loop.backend.hf_weights())
    before, exported = (load_files(tmp_path / name) for name in ("source", "run/hf"))
    trained = sum(int((held[name] != x.float()).sum()) for name, x in before.items())
    lost = sum(int(((held[name] != x.float()) & (exported[name] == x)).sum()) for name, x in before.items())
    assert 0 < lost < trained
    assert f"of {trained} trained elements {lost} get their old value back" in caplog.text
    assert {x.dtype for x in exported.values()} == {torch.bfloat16}
