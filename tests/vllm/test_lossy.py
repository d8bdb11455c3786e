"""Engines that draft tokens or compute with fewer bits: what the verification of a weight sync still proves."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fsdptrain.errors import RolloutError
from fsdptrain.types import Completion, Prompt, SamplingParams
from tests.agreement import difference
from tests.testing import spawn
from tests.vllm import contract, models
from tests.vllm.faults import FaultyTransfer, sync

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
REPEATING = [Prompt(str(i), [5 + i, 6, 7, 8] * 8, "") for i in range(16)]
SAMPLING = SamplingParams(num_samples=8, max_tokens=48, temperature=0.7, seed=5)


def speculated(folder: Path) -> tuple[list[Completion], int]:
    """Completions, and how many tokens were drafted."""
    options = contract.colocated(folder, rollout_engine_args={"speculative_config": NGRAM})
    backend, engine, verifier = contract.build_verified(options)
    engine.update_weights(verifier.record(backend.hf_weights("hub")), 0)
    verifier.verify(0)
    from vllm.v1.sample.rejection_sampler import RejectionSampler  # pyright: ignore[reportMissingImports] - an extra

    drafted, forward = [], RejectionSampler.forward

    def counted(self: Any, metadata: Any, *args: Any) -> Any:
        drafted.append(sum(metadata.num_draft_tokens))
        return forward(self, metadata, *args)

    RejectionSampler.forward = counted
    completions = engine.generate(REPEATING, SAMPLING)
    engine.close()
    return completions, sum(drafted)


def test_drafted_tokens_have_the_distribution_and_the_logprobs_of_the_model(tmp_path):
    """The logprob of a token is minus the entropy on average, if and only if it is drawn from the distribution."""
    folder = models.save("tied", tmp_path)
    [(completions, num_drafted)] = spawn(1, speculated, folder, timeout=300)
    assert num_drafted > 100
    model, surprises = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), []
    for completion in completions:
        prompt = REPEATING[int(completion.prompt_id)].token_ids
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        with torch.no_grad():
            logprobs = (model(ids).logits[0, len(prompt) - 1 : -1] / SAMPLING.temperature).log_softmax(-1)
        own = logprobs.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert (own - torch.tensor(completion.logprobs)).abs().max() < 1e-4
        surprises.append(own - (logprobs.exp() * logprobs).sum(-1))
    found = torch.cat(surprises).double()
    assert found.mean().abs() < 5 * found.std() / len(found) ** 0.5


def lossy(folder: Path, args: dict[str, Any], victim: str, bf16: bool) -> tuple[float, str]:
    """The difference of the engine from the trainer, and the error after a stale tensor."""
    options = contract.colocated(folder, rollout_engine_args=args, bf16=bf16)
    backend, engine, verifier = contract.build_verified(options)
    transfer = FaultyTransfer()
    for version in range(3):
        sync(backend, engine, verifier, version, transfer)
    apart = difference(backend, contract.PROMPTS, engine.generate(contract.PROMPTS, contract.SAMPLING))
    with pytest.raises(RolloutError) as stale:
        sync(backend, engine, verifier, 3, transfer, "stale", victim)
    engine.close()
    return apart, str(stale.value)


VICTIM = "model.layers.1.mlp.up_proj.weight"


def test_of_a_quantized_engine_the_tensors_that_it_received_are_compared(tmp_path):
    """vLLM on a CPU quantizes no weights while it loads them: this method leaves the layers of a dense model alone."""
    args, folder = {"quantization": "int8_per_channel_weight_only"}, models.save("tied", tmp_path)
    [(_, stale)] = spawn(1, lossy, folder, args, VICTIM, True, timeout=300)
    assert f"does not hold {VICTIM} of version 3" in stale
