"""After every push servers answer with exactly the weights of the trainer, and as an engine that starts with them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdptrain.algo.weights import Totals
from fsdptrain.backends.fsdp import FSDPBackend
from fsdptrain.config import Config
from fsdptrain.data.packing import pack
from fsdptrain.errors import ConfigError, RolloutError
from fsdptrain.rollout import engine_factory
from fsdptrain.rollout.vllm_server import VLLMServerEngine
from fsdptrain.testing import spawn
from fsdptrain.types import Completion, Sample
from tests.vllm.servers import cases
from tests.vllm.servers.conftest import weights_of


def build(options: dict[str, Any]) -> VLLMServerEngine:
    config = Config(**options)
    make = engine_factory(config.rollout.engine, device_type="cpu")
    return make(config, checkpoint=Path(config.model.hf_checkpoint), device=torch.device("cpu"))


def agreement(options: dict[str, Any], steps: int) -> list[float]:
    """Largest difference of a logprob between servers and trainer, after each of `steps` changes of the weights."""
    backend = FSDPBackend(Config(**options), total_steps=1)
    engine, found = build(options), []
    try:
        for version in range(steps):
            perturb(backend, version)
            engine.wake_up()
            engine.update_weights(backend.hf_weights(engine.weight_naming), version)
            completions = engine.generate(cases.PROMPTS, cases.SAMPLING)
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
        prompt = cases.PROMPTS[i // 2].token_ids
        mask = [False] * len(prompt) + [True] * len(completion.token_ids)
        logprobs = [0.0] * len(prompt) + completion.logprobs
        samples.append(Sample(completion.prompt_id, prompt + completion.token_ids, mask, logprobs))
    batch = pack(samples, aggregation="token_mean", totals=Totals(1000, 100), max_response_len=64)
    [logprobs] = backend.score([batch], "policy")
    return (logprobs.values - batch.rollout_logprobs)[batch.loss_mask].abs().max().item()


@pytest.mark.parametrize("push", ["file", "gloo"])
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_servers_and_trainer_agree_after_every_push(models, urls, tmp_path, name, push):
    options = cases.attached(
        models[name].first, urls[name], weight_push=push, output_dir=str(tmp_path), update_weight_buffer_size=100_000
    )
    for found in spawn(2, agreement, options, 3, timeout=200):
        assert max(found) < 1e-4, found


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_a_server_after_a_push_equals_an_engine_that_starts_with_the_weights(
    models, urls, fresh_answers, alone, tmp_path, name
):
    engine = build(cases.attached(models[name].first, urls[name], output_dir=str(tmp_path)))
    try:
        engine.update_weights(weights_of(models[name].first).items(), 0)
        before = engine.generate(cases.PROMPTS, cases.GREEDY)
        engine.update_weights(weights_of(models[name].other).items(), 1)
        after = engine.generate(cases.PROMPTS, cases.GREEDY)
    finally:
        engine.close()
    assert [[c.token_ids, c.logprobs] for c in after] == fresh_answers[name]
    assert [c.logprobs for c in before] != [c.logprobs for c in after]


def test_a_server_that_was_started_otherwise_is_refused_with_the_flags_that_it_lacks(models, urls, alone, tmp_path):
    options = cases.attached(models["tied"].first, urls["tied"], output_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="--dtype bfloat16"):
        build({**options, "bf16": True})
    with pytest.raises(ConfigError, match="401"):
        build({name: value for name, value in options.items() if name != "rollout_api_key_env"})


def test_the_key_is_in_no_file_of_the_run_and_in_no_error(models, urls, alone, tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLOUT_KEY", "another key")
    with pytest.raises(ConfigError) as caught:
        build(cases.attached(models["tied"].first, urls["tied"], output_dir=str(tmp_path)))
    assert "another key" not in str(caught.value)
    files = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any("another key" in text or cases.KEY in text for text in [*files, json.dumps(str(caught.value))])


def test_an_update_without_one_tensor_stops_the_run_and_names_it(models, urls, alone, tmp_path):
    """Last of this file: a server whose update failed must be started again."""
    weights = weights_of(models["untied"].other)
    del weights["model.layers.1.mlp.down_proj.weight"]
    engine = build(cases.attached(models["untied"].first, urls["untied"], output_dir=str(tmp_path)))
    with pytest.raises(RolloutError, match=r"did not switch .*1 parameters got no weights.*layers\.1\.mlp\.down_proj"):
        engine.update_weights(weights.items(), 1)
    with pytest.raises(RolloutError, match="no weights"):
        engine.generate(cases.PROMPTS, cases.GREEDY)
    engine.close()
