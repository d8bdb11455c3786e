"""The embedded engine on real ranks agrees with the trainer. On other ranks: test_episodes.py, test_embedded.py."""

from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdptrain.config import Config
from fsdptrain.trainer.evaluation import evaluation_metrics
from fsdptrain.types import Prompt, Sample, SamplingParams
from tests import agreement, zoo
from tests.exact import Exact, backends_in_float64
from tests.testing import save_tiny_checkpoint, spawn
from tests.vllm import contract

# tied, fused experts, softcap and eager attention, sinks, recurrent states, a persistent buffer, learned positions
ARCHITECTURES = ("qwen2", "qwen3_moe", "gemma2", "gpt_oss", "qwen3_next", "deepseek_v3", "gpt2")
TRUNCATION: dict[str, Any] = {"top_p": 0.8, "top_k": 50, "min_p": 0.02}


def engine_difference(folder: Path, **truncation: float) -> float:
    options = {f"rollout_{name}": value for name, value in truncation.items()}
    config = Config(hf_checkpoint=str(folder), rollout_engine="hf", bf16=False, rollout_temperature=0.7, **options)
    prompts = [Prompt(f"{dist.get_rank()}/{i}", [5 + i] * length, "") for i, length in enumerate([3, 17, 9])]
    sampling = SamplingParams(num_samples=2, max_tokens=8, temperature=0.7, **truncation)
    return agreement.push_and_compare(*agreement.build(config), prompts, sampling, mode=Exact)


def engine_differences(root: Path) -> dict[str, float]:
    backends_in_float64()
    found = {name: engine_difference(root / name) for name in ARCHITECTURES}
    return found | {"truncated": engine_difference(root / "gemma2", **TRUNCATION)}


def test_engine_and_trainer_agree_on_every_sampled_token(tmp_path):
    for name in ARCHITECTURES:
        zoo.build(name).save_pretrained(tmp_path / name)
    for found in spawn(2, engine_differences, tmp_path):
        assert {name: value for name, value in found.items() if not value < 1e-12} == {}


def test_engine_and_trainer_agree_after_every_update(tmp_path: Path) -> None:
    """The contract of every engine; tests/vllm checks it for those of vLLM."""
    options = {**contract.OPTIONS, "hf_checkpoint": str(save_tiny_checkpoint(tmp_path)), "rollout_engine": "hf"}
    for found in spawn(2, agreement_in_float64, options):
        assert max(found) < 1e-12, found


def agreement_in_float64(options: dict[str, Any]) -> list[float]:
    backends_in_float64()
    return contract.agreement(options, 3, mode=Exact)


SCORED = [Sample(str(i // 2), [7, 7], [False, True], [0.0] * 2, reward=r) for i, r in enumerate((1.0, 0.0, 0.5, 1.0))]


def evaluated() -> dict[str, float]:
    """Rank 0 has no samples."""
    return evaluation_metrics(SCORED if dist.get_rank() else [], num_samples=2, name="set")


def test_metrics_of_an_evaluation_are_those_of_all_ranks() -> None:
    assert spawn(2, evaluated) == [evaluation_metrics(SCORED, num_samples=2, name="set")] * 2
