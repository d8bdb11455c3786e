"""The embedded engine on real ranks: it agrees with the trainer, and its completions do not depend on the ranks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from fsdptrain.config import Config
from fsdptrain.rewards.values import RewardResult
from fsdptrain.rollout.embedded.engine import HFEngine
from fsdptrain.trainer.evaluation import evaluation_metrics
from fsdptrain.trainer.samples.single_turn import make_sample
from fsdptrain.types import Completion, Prompt, SamplingParams
from tests import agreement, zoo
from tests.exact import Exact, backends_in_float64
from tests.testing import save_tiny_checkpoint, spawn
from tests.vllm import contract

PROMPTS = [Prompt(f"p{i}", [5 + i] * (1 + 3 * (i % 4)), "") for i in range(7)]
SAMPLING = SamplingParams(num_samples=3, max_tokens=20, seed=1)
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


def make_engine(folder: Path) -> HFEngine:
    engine = HFEngine(folder, dtype=torch.float32, device=torch.device("cpu"))
    engine.update_weights(AutoModelForCausalLM.from_pretrained(folder).state_dict().items(), 1)
    return engine


def score(completion: Completion) -> RewardResult:
    """By content, so that the rank does not matter: some right, some wrong, some unscored."""
    length = len(completion.token_ids)
    return RewardResult(None if length % 7 == 0 else float(length % 2))


def run_share(folder: Path, counts: list[int]) -> list[tuple[list[Completion], dict[str, float]]]:
    backends_in_float64()
    engine, found = make_engine(folder), []
    for count in counts:
        share = agreement.of_this_rank(PROMPTS[:count])
        with Exact():
            completions = engine.generate(share, SAMPLING)
        repeated = [prompt for prompt in share for _ in range(SAMPLING.num_samples)]
        samples = [make_sample(prompt, c, score(c)) for prompt, c in zip(repeated, completions, strict=True)]
        found.append((completions, evaluation_metrics(samples, num_samples=SAMPLING.num_samples, name="set")))
    return found


def test_completions_and_metrics_do_not_depend_on_the_number_of_ranks(tmp_path):
    save_tiny_checkpoint(tmp_path)
    counts = [7, 1]  # with one prompt, the second rank has none
    [alone], ranks = spawn(1, run_share, tmp_path, counts), spawn(2, run_share, tmp_path, counts)
    for num_prompts, (whole, metrics), (first, first_metrics), (second, second_metrics) in zip(
        counts, alone, *ranks, strict=True
    ):
        by_prompt: dict[str, list[Completion]] = {}
        for completion in [*first, *second]:
            by_prompt.setdefault(completion.prompt_id, []).append(completion)
        shared = [completion for prompt in PROMPTS[:num_prompts] for completion in by_prompt[prompt.id]]
        for one, other in zip(whole, shared, strict=True):
            assert one == replace(other, logprobs=one.logprobs)
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-12)
        assert len(whole) == 3 * num_prompts
        assert first_metrics == second_metrics == pytest.approx(metrics)
