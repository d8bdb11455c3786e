"""FSDPBackend on real ranks: skips and the reference are exact. Gradients and resume: test_laws.py."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsdptrain.algo.losses import LOSSES
from fsdptrain.algo.weights import count_totals, num_loss_tokens
from fsdptrain.config import Config
from fsdptrain.data.packing.pack import pack, plan_packs
from fsdptrain.errors import CheckpointError, ConfigError, NumericsError
from fsdptrain.fsdp.backend import FSDPBackend
from fsdptrain.fsdp.optimizer import MAX_SKIPPED
from fsdptrain.fsdp.optimizer_state import state_tensors
from fsdptrain.fsdp.reference import ReferenceBank
from fsdptrain.fsdp.shards import local_shard
from fsdptrain.trainer.batches import PackingRules, StepBatches, make_batches
from fsdptrain.trainer.samples.source import own_share
from fsdptrain.types import LossConfig, Sample
from tests import zoo
from tests.testing import save_tiny_checkpoint, spawn

from .sharded import full, full_state

MAX_RESPONSE = 40
GROUP_SIZE, SHORTEST_PROMPT = 4, 32
GRPO = LossConfig(entropy_coef=0.01, kl_loss_coef=0.1)


def samples(count: int = 10, seed: int = 0) -> list[Sample]:
    """Unequal lengths, prompts without loss, advantages of both signs."""
    generator = torch.Generator().manual_seed(seed)

    def number(low, high):
        return int(torch.randint(low, high, (1,), generator=generator))

    made = []
    for i in range(count):
        prompt, response = number(1, 9), number(1, MAX_RESPONSE)
        tokens = torch.randint(5, zoo.VOCAB_SIZE, (prompt + response,), generator=generator).tolist()
        advantage = float(torch.randn((), generator=generator))
        mask = [False] * prompt + [True] * response
        made.append(Sample(str(i), tokens, mask, [-5.0 if m else 0.0 for m in mask], advantage=advantage))
    return made


def grouped_samples(groups: int = 4, seed: int = 0) -> list[Sample]:
    """Groups of one prompt each, of other lengths; responses of unequal ones, advantages of both signs."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for group in range(groups):
        prompt = torch.randint(5, zoo.VOCAB_SIZE, (SHORTEST_PROMPT + 9 * group,), generator=generator).tolist()
        for _ in range(GROUP_SIZE):
            length = int(torch.randint(1, MAX_RESPONSE, (), generator=generator))
            response = torch.randint(5, zoo.VOCAB_SIZE, (length,), generator=generator).tolist()
            mask = [False] * len(prompt) + [True] * length
            logprobs = [-5.0 if m else 0.0 for m in mask]
            advantage = float(torch.randn((), generator=generator))
            made.append(Sample(str(group), [*prompt, *response], mask, logprobs, advantage=advantage))
    return made


def make_steps(backend: FSDPBackend, items: list[Sample], max_tokens: int, **changes) -> list[StepBatches]:
    """As the trainer makes them from the samples of all ranks; `changes` of its rules."""
    rules = PackingRules.of(backend._config, layout=backend.layout_probe.layout, features=backend.features)
    return make_batches(own_share(items), dataclasses.replace(rules, max_tokens=max_tokens, **changes), rollout=0)


def packs_of_this_rank(items: list[Sample], max_tokens: int):
    """As the trainer does it: one plan for all ranks, this rank's packs of it."""
    plan = plan_packs([len(s.token_ids) for s in items], num_ranks=dist.get_world_size(), max_tokens=max_tokens)
    totals = count_totals([num_loss_tokens(s) for s in items])
    return [
        pack([items[i] for i in indices], aggregation="sequence_mean", totals=totals, max_response_len=MAX_RESPONSE)
        for indices in plan.packs[dist.get_rank()]
    ]


def config(checkpoint: Path | str, **values) -> Config:
    flat = {"bf16": False, "lr": 1e-2, "clip_grad": 0.5, "rollout_temperature": 0.9, "rollout_max_response_len": 64}
    return Config(**{"hf_checkpoint": str(checkpoint), "kl_loss_coef": 0.0, **flat, **values})


def scored(backend, packs, *, reference: bool):
    """Old logprobs a little off the policy's, so that ratios differ from 1; reference logprobs where asked for."""
    found = []
    olds = backend.compute_logprobs(packs, "policy")
    refs = backend.compute_logprobs(packs, "reference") if reference else [None] * len(packs)
    for batch, old, ref in zip(packs, olds, refs, strict=True):
        old = old.values + 0.1 * torch.sin(batch.labels.float())
        found.append(dataclasses.replace(batch, old_logprobs=old, ref_logprobs=None if ref is None else ref.values))
    return found


def keep_gradients(optimizer) -> dict:
    """Filled, before clipping, in each step from now on."""
    found: dict = {}
    clip = optimizer.clip

    def keep_and_clip():
        found.update({name: p.grad.full_tensor().clone() for p, name in optimizer.names.items()})
        return clip()

    optimizer.clip = keep_and_clip
    return found


def swap(checkpoint: str, values: dict):
    """Reference logprobs before and after training; the policy around a swap, and around one that breaks off."""
    backend = FSDPBackend(config(checkpoint, kl_loss_coef=0.1, **values), total_steps=10)
    packs, swaps, stock = packs_of_this_rank(samples(), 64), [], ReferenceBank._swap
    ReferenceBank._swap = lambda bank, model: swaps.append(model) or stock(bank, model)

    def score(role):
        return [x.values for x in backend.compute_logprobs(packs, role)]

    start, reference = score("policy"), score("reference")
    assert len(swaps) == 2 <= len(packs), "one swap in and one out"
    backend.train_step(packs, LOSSES["grpo"], GRPO)
    trained, weights = score("policy"), full_state(backend._model)
    later = score("reference")
    after = score("policy")
    broken = dataclasses.replace(packs[0], labels=torch.full_like(packs[0].labels, 10**6))
    with pytest.raises((IndexError, RuntimeError)):
        backend.compute_logprobs([packs[0], broken], "reference")
    again, kept = score("policy"), full_state(backend._model)
    assert all(torch.equal(weights[name], kept[name]) for name in weights)
    return start, reference, trained, later, after, again


@pytest.mark.parametrize("values", [{"fsdp_cpu_offload": True}, {"fsdp_reshard_after_forward": False}], ids=str)
def test_the_reference_stays_what_it_was_and_the_policy_comes_back_bitwise(checkpoint, values):
    for start, reference, trained, later, after, again in spawn(2, swap, checkpoint, values):
        for i in range(len(start)):
            assert torch.equal(start[i], reference[i])
            assert torch.equal(reference[i], later[i])
            assert torch.equal(trained[i], after[i])
            assert torch.equal(trained[i], again[i])
            assert not torch.equal(trained[i], later[i])


def other_reference(checkpoint: str, other: str, small: str):
    packs = packs_of_this_rank(samples(), 128)
    backend = FSDPBackend(config(checkpoint, kl_loss_coef=0.1, ref_load=other), total_steps=10)
    found = [x.values for role in ("policy", "reference") for x in backend.compute_logprobs(packs, role)]
    expected = []
    for path in (checkpoint, other):
        expected += [x.values for x in FSDPBackend(config(path), total_steps=10).compute_logprobs(packs, "policy")]
    with pytest.raises(CheckpointError, match="--ref-load"):
        FSDPBackend(config(checkpoint, kl_loss_coef=0.1, ref_load=small), total_steps=10)
    return found, expected


def test_ref_load_takes_another_checkpoint_of_the_same_shapes(checkpoint, tmp_path):
    other = str(save_tiny_checkpoint(tmp_path / "other", seed=5))
    small = str(save_tiny_checkpoint(tmp_path / "small", hidden_size=32))
    for found, expected in spawn(2, other_reference, checkpoint, other, small):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert not torch.equal(found[0], found[len(found) // 2])


def spoil_one_rank(backend, bad_step: int, value: float):
    """From now on the gradient of rank 1 holds `value` in step `bad_step`."""
    clip, steps = backend._optimizer.clip, iter(range(100))

    def spoiled():
        if next(steps) == bad_step and dist.get_rank() == 1:
            gradients = (p.grad.to_local() for p in backend._model.parameters())
            next(gradient for gradient in gradients if gradient.numel()).view(-1)[0] = value
        return clip()

    backend._optimizer.clip = spoiled


def skip(checkpoint: str, value: float, values: dict):
    backend = FSDPBackend(config(checkpoint, **values), total_steps=10)
    packs = packs_of_this_rank(samples(), 128)
    backend.train_step(packs, LOSSES["grpo"], GRPO)
    backend._optimizer.num_failed = MAX_SKIPPED
    spoil_one_rank(backend, 0, value)
    before, state = full_state(backend._model), {k: v.clone() for k, v in state_tensors(backend._optimizer).items()}
    scale = backend._optimizer.scaler.get_scale()
    try:
        metrics = backend.train_step(packs, LOSSES["grpo"], GRPO)
    except NumericsError as error:
        metrics = {"optim/skipped_steps": 1.0, "message": str(error)}
    after = full_state(backend._model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(torch.equal(full(state[k]), full(v)) for k, v in state_tensors(backend._optimizer).items())
    next_metrics = backend.train_step(packs, LOSSES["grpo"], GRPO)
    return metrics, scale, backend._optimizer.scaler.get_scale(), next_metrics


@pytest.mark.parametrize("values", [{}, {"offload_optimizer": True}], ids=["device", "optimizer on the host"])
def test_fp16_skips_on_all_ranks_when_one_overflows_and_halves_its_scale(checkpoint, values):
    results = spawn(2, skip, checkpoint, math.inf, {"fp16": True, **values})
    assert results[0] == results[1]
    metrics, scale, halved, following = results[0]
    assert halved == scale / 2
    assert metrics["optim/skipped_steps"] == following["optim/skipped_steps"] == 1
    assert "optim/grad_norm" not in metrics
    assert math.isfinite(following["optim/grad_norm"])


def test_a_nan_on_one_rank_skips_everywhere_and_stops_the_run_at_the_limit(checkpoint):
    for metrics, _, _, following in spawn(2, skip, checkpoint, math.nan, {}):
        assert "not finite" in metrics["message"]
        assert following["optim/skipped_steps"] == 1


def step_without_work(checkpoint: str):
    backend = FSDPBackend(config(checkpoint, lr_decay_style="linear"), total_steps=4)
    packs = packs_of_this_rank(samples(), 128)
    backend.train_step(packs, LOSSES["grpo"], GRPO)
    before = full_state(backend._model)
    nothing = backend.train_step(packs_of_this_rank([], 128), LOSSES["grpo"], GRPO)
    after = full_state(backend._model)
    assert all(torch.equal(before[name], after[name]) for name in before), "not even by Adam's momentum"
    return nothing["optim/lr"], backend.train_step(packs, LOSSES["grpo"], GRPO)["optim/lr"]


def test_a_step_without_samples_leaves_the_weights_and_keeps_the_schedule(checkpoint):
    for rates in spawn(2, step_without_work, checkpoint):
        assert rates == pytest.approx((1e-2 * 3 / 4, 1e-2 * 2 / 4))


def held(tensors: list[torch.Tensor]) -> int:
    """Bytes of their storages, wherever those are."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def offload_between_steps(checkpoint: str):
    backend = FSDPBackend(config(checkpoint), total_steps=10)
    packs = packs_of_this_rank(samples(), 128)
    backend.train_step(packs, LOSSES["grpo"], GRPO)
    before = full_state(backend._model)
    weights = [local_shard(p) for p in backend.model.parameters()]
    state = state_tensors(backend._optimizer).values()
    moments = [local_shard(t) for t in state if t.device.type == backend.device.type]
    backend.offload(keep_weights=True)
    assert held(moments) == 0 < held(weights)
    backend.compute_logprobs(packs, "policy")
    backend.offload()
    backend.offload()  # what is away stays away
    assert held(moments) == held(weights) == 0
    backend.onload()
    after = full_state(backend._model)
    backend.train_step(packs, LOSSES["grpo"], GRPO)
    return all(torch.equal(before[name], after[name]) for name in before)


def test_offload_and_onload_change_nothing(tmp_path):
    checkpoint = str(save_tiny_checkpoint(tmp_path, dtype=torch.bfloat16))  # no storage is a file's
    assert all(spawn(2, offload_between_steps, checkpoint))


def other_names(checkpoint: str):
    def loss(batch, logprobs, loss_config):
        output = LOSSES["grpo"](batch, logprobs, loss_config)
        own = {f"own/of_{dist.get_rank()}": output.loss.detach()}
        return dataclasses.replace(output, metrics={**output.metrics, **own})

    backend = FSDPBackend(config(checkpoint, loss="mine:loss"), total_steps=4)
    try:
        backend.train_step(packs_of_this_rank(samples(), 128), loss, GRPO)
    except ConfigError as error:
        return str(error)
    return None


def test_a_loss_that_names_other_metrics_on_another_rank_is_refused_on_all(checkpoint):
    line = "--loss names own/of_0, own/of_1 on rank 0 or rank 1 only: it must name the same everywhere"
    assert spawn(2, other_names, checkpoint) == [line, line]
