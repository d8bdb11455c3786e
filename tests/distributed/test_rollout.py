"""Ranks that share the prompts make what one rank makes, and evaluation sums over all of them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from fsdptrain.errors import RolloutError
from fsdptrain.rewards.scoring import Score
from fsdptrain.rollout.embedded.engine import HFEngine
from fsdptrain.rollout.evaluate import evaluation_metrics
from fsdptrain.testing import save_tiny_checkpoint, spawn
from fsdptrain.trainer.samples.single_turn import make_sample
from fsdptrain.types import Completion, Prompt, SamplingParams
from tests.vllm import contract

PROMPTS = [Prompt(f"p{i}", [5 + i] * (1 + 3 * (i % 4)), "") for i in range(7)]
SAMPLING = SamplingParams(num_samples=3, max_tokens=20, seed=1)


def make_engine(folder: Path) -> HFEngine:
    engine = HFEngine(folder, dtype=torch.float32, device=torch.device("cpu"))
    engine.update_weights(AutoModelForCausalLM.from_pretrained(folder).state_dict().items(), 1)
    return engine


def score(completion: Completion) -> Score:
    """By content, so that it does not matter who scores: some right, some wrong, some unscored."""
    length = len(completion.token_ids)
    return Score(None if length % 7 == 0 else float(length % 2))


def run_share(folder: Path, num_prompts: int) -> tuple[list[Completion], dict[str, float]]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    share = PROMPTS[:num_prompts][rank::world_size]
    completions = make_engine(folder).generate(share, SAMPLING)
    asked = [prompt for prompt in share for _ in range(SAMPLING.num_samples)]
    samples = [make_sample(prompt, c, score(c)) for prompt, c in zip(asked, completions, strict=True)]
    return completions, evaluation_metrics(samples, num_samples=SAMPLING.num_samples, name="set")


def update_with_unknown_name(folder: Path) -> tuple[str, int]:
    """Each weight comes by a collective, as from the trainer: a rank that stopped reading would leave the others."""
    engine = make_engine(folder)

    def gathered():
        for name, tensor in AutoModelForCausalLM.from_pretrained(folder).state_dict().items():
            copy = tensor.clone()
            dist.broadcast(copy, src=0)
            yield name.replace("q_proj", "query"), copy

    with pytest.raises(RolloutError) as caught:
        engine.update_weights(gathered(), 2)
    count = torch.ones(())
    dist.all_reduce(count)
    return str(caught.value), int(count)


@pytest.mark.parametrize("num_prompts", [7, 1])  # with one prompt, the second rank has nothing to do
def test_two_ranks_make_the_completions_and_metrics_of_one(tmp_path, num_prompts):
    save_tiny_checkpoint(tmp_path)
    [(whole, metrics)] = spawn(1, run_share, tmp_path, num_prompts)
    (first, first_metrics), (second, second_metrics) = spawn(2, run_share, tmp_path, num_prompts)
    by_prompt: dict[str, list[Completion]] = {}
    for completion in [*first, *second]:
        by_prompt.setdefault(completion.prompt_id, []).append(completion)
    shared = [completion for prompt in PROMPTS[:num_prompts] for completion in by_prompt[prompt.id]]
    for one, other in zip(whole, shared, strict=True):
        assert one == replace(other, logprobs=one.logprobs)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert len(whole) == 3 * num_prompts
    assert first_metrics == second_metrics == pytest.approx(metrics)


def test_weights_that_do_not_fit_fail_on_every_rank_and_hang_none(tmp_path):
    save_tiny_checkpoint(tmp_path)
    for message, ranks in spawn(2, update_with_unknown_name, tmp_path):
        assert "2 missing: model.layers.0.self_attn.q_proj.weight" in message
        assert "2 unknown: model.layers.0.self_attn.query.weight" in message
        assert ranks == 2


@pytest.mark.parametrize("world_size", [1, 2])
def test_engine_and_trainer_agree_after_every_update(tmp_path: Path, world_size: int) -> None:
    """The contract of every engine; vLLM's are held to it in tests/vllm."""
    folder = save_tiny_checkpoint(tmp_path)
    options = {**contract.OPTIONS, "hf_checkpoint": str(folder), "rollout_engine": "hf"}
    for found in spawn(world_size, contract.agreement, options, 3):
        assert max(found) < 1e-5, found
