"""The engine's logprobs are those of the trainer's own, sharded policy, after the weights were handed over."""

from pathlib import Path

import pytest
import torch.distributed as dist

from fsdptrain.algo.weights import Totals
from fsdptrain.config import Config
from fsdptrain.data.packing.pack import pack
from fsdptrain.fsdp.backend import FSDPBackend
from fsdptrain.rollout import engine_factory
from fsdptrain.testing import spawn
from fsdptrain.types import Prompt, Sample, SamplingParams
from tests import zoo

# tied, fused experts, softcap and eager attention, sinks, recurrent states, a persistent buffer, learned positions
ARCHITECTURES = ("qwen2", "qwen3_moe", "gemma2", "gpt_oss", "qwen3_next", "deepseek_v3", "gpt2")


TRUNCATIONS = [
    {"rollout_top_p": 0.9},
    {"rollout_top_k": 20},
    {"rollout_min_p": 0.05},
    {"rollout_top_p": 0.8, "rollout_top_k": 50, "rollout_min_p": 0.02},
]


def largest_difference(folder: Path, **truncation: float) -> float:
    config = Config(hf_checkpoint=str(folder), bf16=False, rollout_temperature=0.7, **truncation)
    backend = FSDPBackend(config, total_steps=1)
    make_engine = engine_factory(config.rollout.engine, device_type=backend.device.type)
    engine = make_engine(config, checkpoint=backend.checkpoint_path, device=backend.device)
    engine.update_weights(backend.hf_weights(engine.weight_naming), 1)

    prompts = [Prompt(f"{dist.get_rank()}/{i}", [5 + i] * length, "") for i, length in enumerate([3, 17, 9])]
    asked = {name.removeprefix("rollout_"): value for name, value in truncation.items()}
    sampling = SamplingParams(num_samples=2, max_tokens=20, temperature=0.7, **asked)
    samples = []
    for i, completion in enumerate(engine.generate(prompts, sampling)):
        prompt, response = prompts[i // 2].token_ids, completion.token_ids
        mask = [False] * len(prompt) + [True] * len(response)
        logprobs = [0.0] * len(prompt) + completion.logprobs
        samples.append(Sample(completion.prompt_id, prompt + response, mask, logprobs))
    batch = pack(samples, aggregation="token_mean", totals=Totals(1000, 100), max_response_len=20)
    [logprobs] = backend.score([batch], "policy")
    return (logprobs.values - batch.rollout_logprobs)[batch.loss_mask].abs().max().item()


def differences(folders: list[Path]) -> list[float]:
    return [largest_difference(folder) for folder in folders]


def truncated_differences(folders: list[Path]) -> list[float]:
    return [largest_difference(folder, **truncation) for folder in folders for truncation in TRUNCATIONS]


def test_engine_and_trainer_agree_on_every_sampled_token(tmp_path):
    folders = [tmp_path / name for name in ARCHITECTURES]
    for name, folder in zip(ARCHITECTURES, folders, strict=True):
        zoo.build(name).save_pretrained(folder)
    for found in spawn(2, differences, folders):
        assert dict(zip(ARCHITECTURES, found, strict=True)) == pytest.approx(
            dict.fromkeys(ARCHITECTURES, 0.0), abs=1e-5
        )


def test_engine_and_trainer_agree_on_truncated_distributions(tmp_path):
    folders = [tmp_path / name for name in ("qwen2", "gemma2")]
    for folder in folders:
        zoo.build(folder.name).save_pretrained(folder)
    for found in spawn(2, truncated_differences, folders):
        assert found == pytest.approx([0.0] * 8, abs=3e-6)  # seen: 1.4e-6; another set would be off by 1e-3 or more
