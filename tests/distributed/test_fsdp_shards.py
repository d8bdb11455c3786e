"""Shards that are modified between forward passes: the next one sees the change. Offloading: test_laws.py."""

import pytest
import torch

from fsdptrain.config import OptimConfig
from fsdptrain.fsdp.optimizer import Optimizer
from fsdptrain.fsdp.shards import local_shard
from fsdptrain.model.structure import reshard
from tests.testing import spawn

from .sharded import backward, sharded_qwen3, tokens

KEPT, OFFLOADED = {"reshard_after_forward": False}, {"cpu_offload": True}


def logits(model):
    with torch.no_grad():
        return model(input_ids=tokens(50), use_cache=False).logits


def scale(model):
    with torch.no_grad():
        for p in model.parameters():
            local_shard(p).mul_(1.5)
    return model


def write_after_forward(options: dict):
    """Logits before a write to all shards, after it, and of a model that had these weights from the start."""
    model = sharded_qwen3(**options)
    before = logits(model)
    reshard(model)
    return before, logits(scale(model)), logits(scale(sharded_qwen3(**options)))


@pytest.mark.parametrize("options", [KEPT, OFFLOADED])
def test_a_write_after_reshard_is_seen_by_the_next_forward(options):
    for before, after, expected in spawn(2, write_after_forward, options):
        assert torch.equal(after, expected)
        assert not torch.equal(after, before)


def steps_after_evaluation():
    """Logits after an optimizer step, without and with an evaluation before it."""
    found = []
    for evaluate in (False, True):
        model = sharded_qwen3(**KEPT)
        optimizer = Optimizer(model, OptimConfig(lr=1e-2), total_steps=3, fp16=False)
        backward(model, optimizer, seed=0)
        if evaluate:
            logits(model)
        optimizer.clip()
        optimizer.step()
        found.append(logits(model))
    return found


def test_an_optimizer_step_after_an_evaluation_is_seen_by_the_next_forward():
    for expected, found in spawn(2, steps_after_evaluation):
        assert torch.equal(found, expected)
