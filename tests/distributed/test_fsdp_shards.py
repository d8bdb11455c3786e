"""Shards that are modified between forward passes: the next one sees the change; a stash restores every bit."""

import pytest
import torch

from fsdptrain.config import OptimConfig
from fsdptrain.fsdp.optimizer import Optimizer
from fsdptrain.fsdp.reference import ReferenceBank
from fsdptrain.fsdp.shards import local_shard
from fsdptrain.fsdp.stash import HostStash
from fsdptrain.model.structure import reshard
from tests.testing import spawn

from .sharded import backward, full_state, sharded_qwen3, tokens, train


def logits(model):
    with torch.no_grad():
        return model(input_ids=tokens(50), use_cache=False).logits


def write_after_forward(options: dict):
    """Logits before a write to all shards, after it, and of a model that had these weights from the start."""
    model = sharded_qwen3(**options)
    before = logits(model)
    reshard(model)
    with torch.no_grad():
        for p in model.parameters():
            local_shard(p).mul_(1.5)
    after = logits(model)
    fresh = sharded_qwen3(**options)
    with torch.no_grad():
        for p in fresh.parameters():
            local_shard(p).mul_(1.5)
    return before, after, logits(fresh)


@pytest.mark.parametrize("options", [{"reshard_after_forward": False}, {"cpu_offload": True}])
def test_a_write_after_reshard_is_seen_by_the_next_forward(options):
    for before, after, expected in spawn(2, write_after_forward, options):
        assert torch.equal(after, expected)
        assert not torch.equal(after, before)


def step_after_evaluation(evaluate: bool, options: dict):
    model = sharded_qwen3(**options)
    optimizer = Optimizer(model, OptimConfig(lr=1e-2), total_steps=3, fp16=False)
    backward(model, optimizer, seed=0)
    if evaluate:
        logits(model)
    optimizer.clip()
    optimizer.step()
    return logits(model)


@pytest.mark.parametrize("options", [{"reshard_after_forward": False}])
def test_an_optimizer_step_after_an_evaluation_is_seen_by_the_next_forward(options):
    expected, found = (spawn(2, step_after_evaluation, evaluate, options) for evaluate in (False, True))
    assert torch.equal(found[0], expected[0])


def break_off(options: dict):
    model = sharded_qwen3(**options)
    bank = ReferenceBank(model)
    train(model, Optimizer(model, OptimConfig(lr=1e-2), total_steps=3, fp16=False), [0, 1])
    weights, expected = full_state(model), logits(model)
    with pytest.raises(IndexError), bank.swapped_into(model), torch.no_grad():
        model(input_ids=torch.full((1, 4), 10**6), use_cache=False)
    with pytest.raises(ValueError, match="afterwards"), bank.swapped_into(model):
        reference = logits(model)
        raise ValueError("afterwards")
    kept = full_state(model)
    return all(torch.equal(weights[n], kept[n]) for n in weights), expected, logits(model), reference


@pytest.mark.parametrize("options", [{"reshard_after_forward": False}])
def test_the_policy_is_back_bitwise_after_an_error_within_and_after_a_forward(options):
    for kept, expected, found, reference in spawn(2, break_off, options):
        assert kept
        assert torch.equal(found, expected)
        assert not torch.equal(found, reference)


def stash(away: bool):
    model = sharded_qwen3()
    optimizer = Optimizer(model, OptimConfig(lr=1e-2), total_steps=10, fp16=False)
    train(model, optimizer, [0])
    logits(model)
    if away:
        reshard(model)
        tensors = [local_shard(t) for t in [*model.parameters(), *optimizer.tensors().values()]]
        kept = HostStash(tensors)
        assert {t.untyped_storage().nbytes() for t in tensors} == {0}
        kept.restore()
    return train(model, optimizer, [1, 2]), full_state(model)


def test_what_was_stashed_is_back_bitwise_under_the_same_tensors():
    for (norms, weights), (other_norms, other_weights) in zip(
        spawn(2, stash, False), spawn(2, stash, True), strict=True
    ):
        assert norms == other_norms
        assert all(torch.equal(weights[name], other_weights[name]) for name in weights)
