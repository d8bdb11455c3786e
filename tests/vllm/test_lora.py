"""An adapter that vLLM applies gives the logprobs of the trainer, and of the merged weights."""

from itertools import chain
from pathlib import Path

import pytest
import torch

from fsdptrain.fsdp.backend import FSDPBackend
from fsdptrain.fsdp.shards import local_shard
from fsdptrain.model.structure import reshard
from fsdptrain.types import Completion, Prompt, SamplingParams
from tests.agreement import difference
from tests.matrix import only
from tests.testing import save_tiny_checkpoint, spawn
from tests.vllm import contract

PROMPTS = [Prompt("a", [9, 8, 7], ""), Prompt("b", [5 + i % 200 for i in range(300)], "")]
SAMPLING = SamplingParams(num_samples=2, max_tokens=12, seed=3)


def answers(folder: Path, sync: str, versions: int) -> tuple[list[list[Completion]], list[float]]:
    """Completions under each version of the adapter, and how far those of each were from the trainer."""
    options = contract.colocated(folder, lora_rank=4, lora_sync=sync, rollout_temperature=1.0)
    backend, engine = contract.build(options)
    made, apart = [], []
    for version in range(versions):
        train(backend, version)
        engine.wake_up()
        if sync == "adapter":
            assert backend.push_weights(engine, version)
        else:
            engine.update_weights(backend.hf_weights("hub"), version)
        made.append(engine.generate(PROMPTS, SAMPLING))
        engine.sleep()
        apart.append(difference(backend, PROMPTS, made[-1]))
    engine.close()
    return made, apart


def train(backend: FSDPBackend, version: int) -> None:
    torch.manual_seed(version)
    reshard(backend.model)
    for _, parameter in sorted(backend.model.named_parameters()):
        if parameter.requires_grad:
            shard = local_shard(parameter)
            shard.add_(0.2 * torch.randn(shard.shape))


@pytest.mark.parametrize("tied", only([False], [True, False]))
def test_adapter_and_merged_weights_give_the_same_logprobs(tmp_path, tied):
    folder = save_tiny_checkpoint(tmp_path / "model", head_dim=32, tie_word_embeddings=tied)
    [(alone, apart)] = spawn(1, answers, folder, "adapter", 3, timeout=300)
    [(merged, apart_merged)] = spawn(1, answers, folder, "merged", 3, timeout=300)
    assert max(*apart, *apart_merged) < 1e-4
    assert alone[0] != alone[1]
    pairs = zip(chain.from_iterable(alone), chain.from_iterable(merged), strict=True)
    for left, right in pairs:
        assert left.token_ids == right.token_ids
        assert left.policy_version == right.policy_version
        assert left.logprobs == pytest.approx(right.logprobs, abs=1e-4)
