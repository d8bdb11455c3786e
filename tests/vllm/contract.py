"""What holds for every vLLM engine: it answers with exactly the weights that the trainer has given it last."""

from pathlib import Path
from typing import Any

import torch

from fsdptrain import platform
from fsdptrain.algo.weights import Totals
from fsdptrain.config import Config
from fsdptrain.data.packing.pack import pack
from fsdptrain.fsdp.backend import FSDPBackend
from fsdptrain.rollout import engine_factory
from fsdptrain.rollout.weight_sync.verify import WeightVerifier, build_verifier
from fsdptrain.testing import tiny_tokenizer
from fsdptrain.types import Completion, Prompt, Sample, SamplingParams

LONG = Prompt("long", [5 + i % 200 for i in range(300)], "")  # more than two blocks of the prefix cache
PROMPTS = [Prompt("a", [9, 8, 7], ""), Prompt("b", [20] * 17, ""), LONG]
SAMPLING = SamplingParams(num_samples=2, max_tokens=16, temperature=0.7, seed=3)
OPTIONS: dict[str, Any] = {
    "bf16": False, "rollout_temperature": 0.7, "rollout_max_response_len": 64, "max_tokens_per_gpu": 512,
}  # fmt: skip


def colocated(model: Path, **more: Any) -> dict[str, Any]:
    """Of a small run with vLLM in the trainer's process, whose probe fills a block of the cache."""
    own = {"hf_checkpoint": str(model), "rollout_engine": "vllm", "rollout_kv_cache_gib": 0.05}
    return {**OPTIONS, **own, "max_tokens_per_gpu": 1024, **more}


def build(options: dict[str, Any]) -> tuple[FSDPBackend, Any]:
    """A trainer, and the engine that it gives its weights to."""
    config = Config(**options)
    backend = FSDPBackend(config, total_steps=1)
    make_engine = engine_factory(config.rollout.engine, device_type=platform.device_type())
    return backend, make_engine(config, checkpoint=backend.checkpoint_path, device=backend.device)


def build_verified(options: dict[str, Any]) -> tuple[FSDPBackend, Any, WeightVerifier]:
    """The same, with a verifier of their weight syncs."""
    backend, engine = build(options)
    return backend, engine, verifier_of(options, engine, backend)


def verifier_of(options: dict[str, Any], engine: Any, backend: FSDPBackend) -> WeightVerifier:
    verifier = build_verifier(Config(**options), engine, backend, tiny_tokenizer())
    assert verifier is not None
    return verifier


def agreement(options: dict[str, Any], steps: int) -> list[float]:
    """Largest difference of a logprob between engine and trainer, after each of `steps` changes of the weights."""
    backend, engine = build(options)
    found = []
    try:
        for version in range(steps):
            perturb(backend, version)
            engine.wake_up()
            engine.update_weights(backend.hf_weights(engine.weight_naming), version)
            completions = engine.generate(PROMPTS, SAMPLING)
            engine.sleep()
            assert [c.policy_version for c in completions] == [version] * 6
            found.append(difference(backend, completions))
    finally:
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
