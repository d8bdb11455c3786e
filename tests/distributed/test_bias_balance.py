"""Router bias updates: equal on any mesh, counted in integers, and contained in checkpoints, exports and syncs."""

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from fsdptrain.algo.losses import LOSSES
from fsdptrain.config.rules import NoEffectError
from fsdptrain.errors import RolloutError
from fsdptrain.features.moe.bias import choice_biases
from fsdptrain.fsdp.backend import FSDPBackend
from fsdptrain.fsdp.checkpoint_folder import CheckpointFolder
from fsdptrain.rollout.embedded.engine import build_hf_engine
from fsdptrain.rollout.weight_sync.verify import build_verifier
from fsdptrain.types import LossConfig
from tests import zoo
from tests.matrix import only
from tests.testing import spawn, tiny_tokenizer
from tests.vllm.faults import FaultyTransfer

from .test_fsdp_backend import config, packs_of_this_rank, samples

RATE, STEPS = 0.01, 3
MESHES = {
    "two": (2, [{"gradient_checkpointing": True}, {"context_parallel_size": 2, "expert_parallel_size": 2}]),
    "more of two": (
        2,
        [
            {"layout": "padded", "fsdp_cpu_offload": True},
            {"expert_parallel_size": 2},
            {"tensor_parallel_size": 2, "expert_parallel_size": 2},
        ],
    ),
    "replicas": (4, [{"fsdp_replicate_size": 2, "expert_parallel_size": 2}]),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("deepseek_v3")
    zoo.build("deepseek_v3", num_hidden_layers=3).save_pretrained(folder)
    return str(folder)


def made(checkpoint: str, **values) -> FSDPBackend:
    return FSDPBackend(config(checkpoint, **({"router_bias_update_rate": RATE} | values)), total_steps=10)


def biases(backend: FSDPBackend) -> torch.Tensor:
    """[layers with experts, E]"""
    return torch.stack(list(choice_biases(backend.model).values())).clone()


def count_of(step: int) -> int:
    """In the last step all ranks but one have packs that only fill."""
    return 1 if step == STEPS - 1 else 10


def train(backend: FSDPBackend, *, max_tokens: int = 64, copies: int = 1, steps: Sequence[int] = range(STEPS)):
    """Metrics and biases after each step."""
    found = []
    for step in steps:
        packs = packs_of_this_rank(samples(count_of(step), seed=step), max_tokens, copies)
        metrics = backend.train_step(packs, LOSSES["grpo"], LossConfig())
        found.append((metrics, biases(backend)))
    return found


def learn(checkpoint: str, folder: Path, max_tokens: int, values: dict):
    """What `train` finds; the biases in the weights for an engine and in the export; saved after the last but one."""
    backend = made(checkpoint, **values)
    copies = values.get("tensor_parallel_size", 1) * values.get("context_parallel_size", 1)
    options = {"max_tokens": max_tokens, "copies": copies}
    found = train(backend, steps=range(STEPS - 1), **options)
    CheckpointFolder(folder, keep_last=1).write(1, lambda directory: backend.save(directory, 1))
    found += train(backend, steps=[STEPS - 1], **options)
    sent = [tensor for name, tensor in backend.hf_weights() if name.endswith("correction_bias")]
    backend.export(folder / "hf")
    model = AutoModelForCausalLM.from_pretrained(folder / "hf")
    return found, torch.stack(sent), torch.stack(list(choice_biases(model).values()))


def resume(checkpoint: str, folder: Path, values: dict) -> torch.Tensor:
    backend = made(checkpoint, **values)
    latest = CheckpointFolder(folder, keep_last=1).latest()
    assert latest is not None
    backend.load(latest)
    return biases(backend)


def learn_each(checkpoint: str, folder: Path, cases: list[dict], saved: Path) -> list:
    """`learn` in small packs, and what is resumed from `saved`."""
    return [
        (*learn(checkpoint, folder / str(number), 64, values), resume(checkpoint, saved, values))
        for number, values in enumerate(cases)
    ]


def resume_each(checkpoint: str, folders: list[Path]) -> list[torch.Tensor]:
    return [resume(checkpoint, folder, {}) for folder in folders]


@pytest.fixture(scope="module")
def alone(checkpoint, tmp_path_factory):
    """One rank, one pack; and where it saved."""
    folder = tmp_path_factory.mktemp("alone")
    [result] = spawn(1, learn, checkpoint, folder, 4096, {})
    return *result, folder


def counted(checkpoint: str) -> tuple[torch.Tensor, torch.Tensor]:
    """By the stock model, sequence by sequence: choices [layers, E] of the first step, and its biases."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    layers = [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    counts = torch.zeros(len(layers), 8, dtype=torch.int64)

    def count(_, args, *, row: torch.Tensor) -> None:
        row += args[1].flatten().bincount(minlength=len(row))

    for row, mlp in zip(counts, layers, strict=True):
        mlp.experts.register_forward_pre_hook(partial(count, row=row))
    for sample in samples(seed=0):
        with torch.no_grad():
            model(input_ids=torch.tensor([sample.token_ids]))
    return counts, torch.stack([mlp.gate.e_score_correction_bias for mlp in layers])


def test_a_bias_rises_for_experts_below_the_mean_load_and_falls_for_those_above(checkpoint, alone):
    counts, before = counted(checkpoint)
    metrics, after = alone[0][0]
    mean = counts.double().mean(1, keepdim=True)
    assert torch.equal(after, before + RATE * (mean - counts).sign().float())
    assert (counts > mean).any()
    assert (counts < mean).any()
    assert metrics["moe/load_max"] == pytest.approx((counts / mean).max().item())


@pytest.mark.parametrize("meshes", only(["two"], MESHES))
def test_biases_are_bit_by_bit_those_of_one_rank_also_where_they_are_sent_written_and_resumed(
    checkpoint, alone, tmp_path, meshes
):
    world, cases = MESHES[meshes]
    wanted, sent, written, saved = alone
    (_, before), (_, last) = wanted[-2:]
    assert torch.equal(sent, last)
    assert torch.equal(written, last)
    for rank in spawn(world, learn_each, checkpoint, tmp_path, cases, saved):
        for found, other_sent, other_written, resumed in rank:
            for (metrics, moved), (expected, own) in zip(found, wanted, strict=True):
                assert torch.equal(moved, own)
                assert {n: metrics[n] for n in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)
            assert torch.equal(other_sent, last)
            assert torch.equal(other_written, last)
            assert torch.equal(resumed, before)
    [read] = spawn(1, resume_each, checkpoint, [tmp_path / str(number) for number in range(len(cases))])
    assert all(torch.equal(found, before) for found in read)


def still(checkpoint: str) -> list[bool]:
    """Whether biases stay: without the flag; in a step whose gradients are not finite; in one without a loss."""
    found = []
    for values, spoil in (({"router_bias_update_rate": 0.0}, 1.0), ({}, float("nan")), ({}, 0.0)):
        backend = made(checkpoint, **values)
        before, items = biases(backend), samples()
        if spoil == 0.0:
            for sample in items:
                sample.loss_mask[:] = [False] * len(sample.loss_mask)
        packs = packs_of_this_rank(items, 64)
        for pack in packs:
            pack.advantages.mul_(spoil or 1.0)
        backend.train_step(packs, LOSSES["grpo"], LossConfig())
        found.append(torch.equal(biases(backend), before))
    return found


def test_biases_stay_without_the_flag_and_where_the_optimizer_does_not_step(checkpoint):
    assert spawn(2, still, checkpoint) == [[True] * 3] * 2


def test_moving_biases_balances_experts(checkpoint):
    """The same data again and again, weights that stand still: the most loaded expert comes down."""
    [(first, last)] = spawn(1, balanced, checkpoint)
    assert first > 1.8
    assert last < 0.7 * first


def balanced(checkpoint: str) -> tuple[float, float]:
    backend = made(checkpoint, lr=0.0, router_bias_update_rate=0.02)
    loads = [metrics["moe/load_max"] for metrics, _ in train(backend, max_tokens=4096, steps=[0] * 25)]
    return loads[0], min(loads[-5:])


def refused(checkpoint: str) -> str:
    with pytest.raises(NoEffectError) as caught:
        made(checkpoint)
    return str(caught.value)


def test_a_model_without_such_a_bias_is_refused_on_all_ranks(tmp_path):
    zoo.build("qwen3_moe").save_pretrained(tmp_path)
    for line in spawn(2, refused, str(tmp_path)):
        assert line.startswith("--router-bias-update-rate has no effect on qwen3_moe, whose routers have no bias")


def verification_errors(checkpoint: str, folder: Path) -> list[str]:
    """For an engine that gets stale biases of the first or the last layer."""
    shutil.copytree(checkpoint, folder)
    tiny_tokenizer().save_pretrained(folder)
    backend = made(str(folder), max_tokens_per_gpu=512)
    engine = build_hf_engine(backend._config, checkpoint=backend.checkpoint_path, device=backend.device)
    verifier = build_verifier(backend._config, engine, backend, tiny_tokenizer())
    assert verifier is not None
    transfer, said = FaultyTransfer(), []
    for version, victim in enumerate(["", "model.layers.1", "model.layers.2", ""]):
        name = f"{victim}.mlp.gate.e_score_correction_bias"
        train(backend, steps=[version])
        try:
            engine.update_weights(transfer.carry(verifier.record(backend.hf_weights("module")), "stale", name), version)
            verifier.verify(version)
        except RolloutError as error:
            said.append(str(error))
    return said


def test_the_verification_names_a_bias_that_did_not_arrive(checkpoint, tmp_path):
    [said] = spawn(1, verification_errors, checkpoint, tmp_path / "model")
    assert ["model.layers.1.mlp.gate.e_score" in said[0], "model.layers.2.mlp.gate.e_score" in said[1]] == [True, True]
    assert len(said) == 2
