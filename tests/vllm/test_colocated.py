"""The colocated engine answers with exactly the weights that it was given last, on one rank and on two."""

from pathlib import Path

import pytest
import torch

from fsdptrain.algo.weights import Totals
from fsdptrain.backends.fsdp import FSDPBackend
from fsdptrain.config import Config
from fsdptrain.data.packing import pack
from fsdptrain.rollout import engine_factory
from fsdptrain.testing import save_tiny_checkpoint, spawn
from fsdptrain.types import Completion, Prompt, Sample, SamplingParams

LONG = Prompt("long", [5 + i % 200 for i in range(300)], "")  # more than two blocks of the prefix cache
PROMPTS = [Prompt("a", [9, 8, 7], ""), Prompt("b", [20] * 17, ""), LONG]
SAMPLING = SamplingParams(num_samples=2, max_tokens=16, temperature=0.7, seed=3)


def agreement(folder: Path, steps: int) -> list[float]:
    """Largest difference of a logprob between engine and trainer, after each of `steps` changes of the weights."""
    config = Config(
        hf_checkpoint=str(folder), bf16=False, rollout_temperature=0.7, rollout_kv_cache_gib=0.05,
        rollout_max_response_len=64, max_tokens_per_gpu=512,
    )  # fmt: skip
    backend = FSDPBackend(config, total_steps=1)
    engine = engine_factory("vllm", device_type="cpu")(
        config, checkpoint=backend.checkpoint_path, device=backend.device
    )
    found = []
    for version in range(steps):
        perturb(backend, version)
        engine.wake_up()
        engine.update_weights(backend.hf_weights(engine.weight_naming), version)
        completions = engine.generate(PROMPTS, SAMPLING)
        engine.sleep()
        assert [c.policy_version for c in completions] == [version] * 6
        found.append(difference(backend, completions))
    engine.close()
    return found


def perturb(backend: FSDPBackend, version: int) -> None:
    with torch.no_grad():
        for p in backend.model.parameters():
            p.mul_(1 + 0.3 * version)


def difference(backend: FSDPBackend, completions: list[Completion]) -> float:
    samples = []
    for i, completion in enumerate(completions):
        prompt = PROMPTS[i // 2].token_ids
        mask = [False] * len(prompt) + [True] * len(completion.token_ids)
        logprobs = [0.0] * len(prompt) + completion.logprobs
        samples.append(Sample(completion.prompt_id, prompt + completion.token_ids, mask, logprobs))
    batch = pack(samples, aggregation="token_mean", totals=Totals(1000, 100), max_response_len=64)
    [logprobs] = backend.score([batch], "policy")
    return (logprobs.values - batch.rollout_logprobs)[batch.loss_mask].abs().max().item()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_engine_and_trainer_agree_after_every_update(tmp_path, tied, world_size):
    folder = save_tiny_checkpoint(tmp_path, head_dim=32, tie_word_embeddings=tied)
    for found in spawn(world_size, agreement, folder, 3, timeout=300):
        assert max(found) < 1e-4, found
