"""The memory plan agrees with what tensors hold in a training step on two ranks."""

from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch

from fsdptrain.algo.losses import LOSSES
from fsdptrain.config import Config
from fsdptrain.fsdp.backend import FSDPBackend
from fsdptrain.fsdp.shards import local_shard
from fsdptrain.memory.estimate import Machine, estimate, size_of
from fsdptrain.model.policy import plain_batch
from fsdptrain.types import LossConfig
from tests import zoo
from tests.matrix import only
from tests.testing import spawn

from .storages import Storages

RANKS, LENGTH = 2, 256
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": 2048}
RECOMPUTED = {"gradient_checkpointing": True, "bf16": True}
# Not: few tokens under wide layers, where buffers of gradients make the peak, and recurrent mixers and sinks, whose
# torch code is not counted.
SHAPES: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "gathered": ("llama", 1024, WIDE, {"fsdp_reshard_after_forward": False}),
    "checkpointed": ("qwen3", 1024, {"num_hidden_layers": 6}, {"gradient_checkpointing": True, "bf16": True}),
    "experts": ("qwen3_moe", 1024, {}, {}),
    "mla": ("deepseek_v3", 1024, {}, {}),
    "moved": (
        *("qwen3", 1024, {"num_hidden_layers": 6}),
        {**RECOMPUTED, "offload_activations": True, "offload_optimizer": True},
    ),
    "layers split": ("llama", 1024, WIDE, {"tensor_parallel_size": 2}),
    "experts split": ("qwen3_moe", 1024, {}, {"expert_parallel_size": 2}),
    "compiled": ("qwen3", 1024, {"num_hidden_layers": 6}, {"compile": True}),
    "adapter": ("qwen3", 1024, WIDE, {"lora_rank": 8, "bf16": True}),
}


def config_of(path: str, tokens: int, options: dict[str, Any]) -> Config:
    shape = {"max_tokens_per_gpu": tokens, "rollout_max_prompt_len": LENGTH - 64, "rollout_max_response_len": 64}
    return Config(hf_checkpoint=path, **{"bf16": False, "logprob_chunk_size": 256, **shape, **options})


def measured(path: str, tokens: int, options: dict[str, Any]) -> tuple[int, int]:
    """(most bytes that tensors held during a step of two packs, what was planned), after a first step."""
    storages = Storages()
    storages.watch_inductor()
    config = config_of(path, tokens, options)
    backend = FSDPBackend(config, total_steps=10)
    ids = torch.randint(5, zoo.VOCAB_SIZE, (tokens // LENGTH, LENGTH), generator=torch.Generator().manual_seed(0))
    batch = plain_batch(ids.tolist(), device=torch.device("cpu"))
    packs = [replace(batch, loss_weights=batch.loss_weights / tokens)] * 2
    parameters = list(backend.model.parameters())
    shard = sum(local_shard(p).nbytes for p in parameters if p.requires_grad)
    held = sum(local_shard(p).nbytes for p in parameters) + 2 * shard  # weights and two moments
    found = estimate(backend.model, config, Machine(RANKS, has_accelerator=False, local_ranks=1))
    planned = size_of(found.training) + size_of(found.on_host)  # here both are the memory of the host
    backend.train_step(packs, LOSSES["grpo"], LossConfig())
    with storages:
        backend.train_step(packs, LOSSES["grpo"], LossConfig())
    return held + storages.peak, planned


@pytest.mark.parametrize("shape", only(["checkpointed", "experts split"], SHAPES))
def test_the_estimate_is_near_what_a_step_takes(shape: str, tmp_path: Path):
    name, tokens, changes, options = SHAPES[shape]
    zoo.build(name, **changes).save_pretrained(tmp_path)
    peaks, planned = zip(*spawn(RANKS, measured, str(tmp_path), tokens, options, timeout=600), strict=True)
    share = planned[0] / mean(peaks)  # where experts are split one rank has more rows than the other
    assert 0.8 < share < 1.25  # formulas of shapes leave out what gloo and torch's kernels hold for a moment
