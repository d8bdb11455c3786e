"""The contract of every engine: it answers with exactly the weights of the last update."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from fsdptrain.config import Config
from fsdptrain.fsdp.backend import FSDPBackend
from fsdptrain.rollout.stop_strings import cut_at_stop
from fsdptrain.rollout.stop_tokens import engine_tokenizer
from fsdptrain.rollout.weight_sync.sync import build_verifier
from fsdptrain.rollout.weight_sync.verify import WeightVerifier
from fsdptrain.trainer.samples.single_turn import generate_with
from fsdptrain.types import Completion, Prompt, SamplingParams
from tests.agreement import build as build_engine
from tests.agreement import difference
from tests.testing import save_tiny_checkpoint, splitting_tokenizer

LONG = Prompt("long", [5 + i % 200 for i in range(300)], "")  # more than two blocks of the prefix cache
PROMPTS = [Prompt("a", [9, 8, 7], ""), Prompt("b", [20] * 17, ""), LONG]
SAMPLING = SamplingParams(num_samples=2, max_tokens=16, temperature=0.7, seed=3)
OPTIONS: dict[str, Any] = {
    "bf16": False, "rollout_temperature": 0.7, "rollout_max_response_len": 64, "max_tokens_per_gpu": 512,
}  # fmt: skip


def colocated(model: Path, **more: Any) -> dict[str, Any]:
    """Of a small run with vLLM in the trainer's process."""
    own = {"hf_checkpoint": str(model), "rollout_engine": "vllm", "rollout_kv_cache_gib": 0.05}
    return {**OPTIONS, **own, **more}


def build(options: dict[str, Any]) -> tuple[FSDPBackend, Any]:
    """Build a trainer and its engine."""
    return build_engine(Config(**options))


def build_verified(options: dict[str, Any]) -> tuple[FSDPBackend, Any, WeightVerifier]:
    """The same, with a verifier of their weight syncs."""
    backend, engine = build(options)
    return backend, engine, verifier_of(options, engine)


def verifier_of(options: dict[str, Any], engine: Any) -> WeightVerifier:
    verifier = build_verifier(Config(**options), engine)
    assert verifier is not None
    return verifier


def agreement(
    options: dict[str, Any], steps: int, mode: Callable[[], AbstractContextManager[object]] = nullcontext
) -> list[float]:
    """Return the largest difference of a logprob between engine and trainer after each of `steps` weight updates.

    `mode`: in which both compute.
    """
    backend, engine = build(options)
    try:
        return agreements(backend, engine, steps, mode)
    finally:
        engine.close()


def agreements(
    backend: FSDPBackend, engine: Any, steps: int, mode: Callable[[], AbstractContextManager[object]] = nullcontext
) -> list[float]:
    found = []
    for version in range(steps):
        perturb(backend, version)
        engine.wake_up()
        engine.update_weights(backend.hf_weights(engine.weight_naming), version)
        with mode():
            completions = engine.generate(PROMPTS, SAMPLING)
            engine.sleep()
            found.append(difference(backend, PROMPTS, completions))
        assert [c.policy_version for c in completions] == [version] * 6
    return found


def require_stops(folder: Path, options: dict[str, Any]) -> None:
    """Completions end as if others were cut at the stop strings. Most tokens of the model end within a character."""
    text = "".join(f"{chr(97 + i % 13)}{chr(0x4E00 + 97 * i)}" for i in range(26))
    splitting_tokenizer(text).save_pretrained(save_tiny_checkpoint(folder, head_dim=32))
    stop = ("c", "h", text[1:3])
    backend, engine = build({**options, "rollout_stop": [*stop]})
    try:
        engine.update_weights(backend.hf_weights(engine.weight_naming), 0)
        tokenizer, sampling = engine_tokenizer(folder, False), replace(SAMPLING, num_samples=8)
        prompts = [Prompt(text, tokenizer.convert_tokens_to_ids([text]), "") for text in "abde"]  # whole characters
        free = engine.generate(prompts, sampling)
        made = generate_with(engine, tokenizer, in_flight=False)(prompts, replace(sampling, stop=stop))
    finally:
        engine.close()
    assert "stop" in {completion.finish_reason for completion in made}
    for one, other in zip(made, free, strict=True):
        expected = cut_at_stop(other, stop, tokenizer)
        assert (one.token_ids, one.finish_reason) == (expected.token_ids, expected.finish_reason)
        assert len(one.logprobs) == len(one.token_ids)


def perturb(backend: FSDPBackend, version: int) -> None:
    with torch.no_grad():
        for p in backend.model.parameters():
            p.mul_(1 + 0.3 * version)


def require_logprobs_of_versions(made: Sequence[Completion], folders: Sequence[Path], *, temperature: float) -> None:
    """Versions do not fall, and each token has the logprob of its version, whose weights are of `folders` in turn.

    Also for tokens read before a sync: a cache of the old weights would change the logprobs after it.
    """
    for completion in made:
        assert completion.token_versions == sorted(completion.token_versions)
        expected = _logprobs_by_version(completion, folders, temperature)
        assert (expected - torch.tensor(completion.logprobs)).abs().max() < 1e-4


def _logprobs_by_version(completion: Completion, folders: Sequence[Path], temperature: float) -> torch.Tensor:
    """[R]. The weights of a token read the prompt and all earlier tokens."""
    prompt = next(prompt.token_ids for prompt in PROMPTS if prompt.id == completion.prompt_id)
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    found = torch.zeros(len(completion.token_ids))
    for version, folder in enumerate(folders):
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits[0] / temperature
        logprobs = logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[len(prompt) - 1 :, 0]
        of_these = torch.tensor(completion.token_versions) % len(folders) == version
        found = torch.where(of_these, logprobs.detach(), found)
    return found
