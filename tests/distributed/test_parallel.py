"""Layers and experts split over ranks: what is computed, saved and exported is what one process makes of the model."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from fsdptrain.algo.losses import LOSSES
from fsdptrain.backends.fsdp import FSDPBackend
from fsdptrain.errors import ConfigError
from fsdptrain.fsdp.checkpoint import CheckpointFolder
from fsdptrain.testing import spawn
from tests import zoo

from .sharded import full, full_state
from .test_fsdp_backend import GRPO, config, keep_gradients, packs_of_this_rank, relative, samples, scored

TOLERANCE = 1e-5
LOSS_NAMES = ("grpo", "gspo")
# name -> family and changes; else as the zoo has them
FAMILIES = {"qwen3_moe": ("qwen3_moe", {"num_experts": 8}), "one expert for two": ("qwen3_moe", {"num_experts": 2})}


def tensor(size: int, **more) -> dict:
    return {"tensor_parallel_size": size, **more}


def expert(size: int, **more) -> dict:
    return {"expert_parallel_size": size, **more}


def context(size: int, **more) -> dict:
    return {"context_parallel_size": size, **more}


def copies_of(values: dict) -> int:
    """Ranks that are given the same packs."""
    return values.get("tensor_parallel_size", 1) * values.get("context_parallel_size", 1)


CASES = {
    "qwen3": [
        (2, tensor(2, offload_optimizer=True)),
        (2, context(2, fsdp_cpu_offload=True, load_strategy="rank0")),
        (2, context(2, layout="padded")),
        (4, context(2, fsdp_replicate_size=2)),
        (4, context(2, tensor_parallel_size=2, gradient_checkpointing=True)),
        (4, tensor(2, gradient_checkpointing=True)),
        (4, tensor(2, fsdp_replicate_size=2)),
    ],
    "qwen3_moe": [
        (2, expert(2, fsdp_prefetch=False, layout="padded")),
        (2, tensor(2, expert_parallel_size=2)),
        (4, tensor(2, expert_parallel_size=2, fsdp_reshard_after_forward=False)),
        (4, expert(2, gradient_checkpointing=True)),
        (4, context(2, expert_parallel_size=2)),
        (4, context(2, tensor_parallel_size=2, expert_parallel_size=4)),
        (4, expert(2, fsdp_replicate_size=2)),
        (4, expert(4, offload_optimizer=True)),
    ],
    "gpt_oss": [
        (2, context(2, expert_parallel_size=2)),
        (4, context(4)),
        (2, expert(2)),
        (4, expert(2)),
        (4, expert(4)),
    ],
    "deepseek_v3": [(2, context(2)), (2, expert(2)), (2, tensor(2, expert_parallel_size=2)), (4, expert(4))],
    "gemma3": [(2, tensor(2)), (2, context(2)), (4, context(2))],
    "one expert for two": [(4, expert(2))],
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Family -> its folder, made where it is asked for."""

    def folder(family: str) -> str:
        path = tmp_path_factory.getbasetemp() / f"parallel_{family}"
        if not path.exists():
            name, changes = FAMILIES.get(family, (family, {}))
            zoo.build(name, **changes).save_pretrained(path)
        return str(path)

    return folder


def made(checkpoint: str, values: dict) -> FSDPBackend:
    return FSDPBackend(config(checkpoint, adam_eps=0.01, kl_loss_coef=0.1, **values), total_steps=10)


def learn(checkpoint: str, cases: list[dict], folder: str) -> list:
    """For each of `cases`: logprobs of one pack; gradients and metrics of a step with each loss; weights; an export."""
    found = []
    for number, values in enumerate(cases):
        backend = made(checkpoint, values)
        copies = copies_of(values)
        [whole] = packs_of_this_rank(samples(), 4096, dist.get_world_size())
        logprobs = backend.score([whole], "policy")[0].values
        gradients, steps = keep_gradients(backend._optimizer), []
        for name in LOSS_NAMES:
            packs = scored(backend, packs_of_this_rank(samples(), 128, copies), reference=True)
            metrics = backend.train_step(packs, LOSSES[name], GRPO)
            steps.append((dict(gradients), metrics))
        exported = Path(folder) / f"{dist.get_world_size()}_{number}"
        backend.export(exported)
        hub = dict(backend.hf_weights())
        files: dict = {}
        for path in exported.glob("*.safetensors"):
            files |= load_file(path)
        assert files.keys() == hub.keys()
        assert all(torch.equal(files[name], hub[name]) for name in hub)  # of the float32 checkpoint, in float32
        found.append((logprobs, steps, full_state(backend._model)))
    return found


@pytest.mark.parametrize("family", CASES)
def test_split_over_ranks_a_model_computes_and_learns_what_it_does_alone(checkpoints, tmp_path, family):
    checkpoint = checkpoints(family)
    [[(logprobs, steps, weights)]] = spawn(1, learn, checkpoint, [{}], str(tmp_path / "alone"))
    for world in sorted({world for world, _ in CASES[family]}):
        cases = [values for size, values in CASES[family] if size == world]
        for ranks in zip(*spawn(world, learn, checkpoint, cases, str(tmp_path), timeout=300), strict=True):
            for other_logprobs, other_steps, other_weights in ranks:
                assert (other_logprobs - logprobs).abs().max() < TOLERANCE
                for (gradients, metrics), (wanted, expected) in zip(other_steps, steps, strict=True):
                    assert relative(gradients, wanted) < TOLERANCE
                    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)
                assert relative(other_weights, weights) < 1e-6


def test_the_export_of_untrained_weights_is_the_checkpoint_bitwise(checkpoints, tmp_path):
    for family, values in (
        ("qwen3", tensor(2)),
        ("one expert for two", expert(2)),
        ("qwen3_moe", tensor(2, expert_parallel_size=4)),
    ):
        checkpoint, target = checkpoints(family), tmp_path / f"{family}{len(str(values))}"
        spawn(4, export, checkpoint, values, str(target))
        [ours], [theirs] = ([*Path(x).glob("*.safetensors")] for x in (target, checkpoint))
        written, read = load_file(ours), load_file(theirs)
        assert written.keys() == read.keys()
        assert all(torch.equal(written[name], read[name]) for name in read)


def export(checkpoint: str, values: dict, target: str) -> None:
    made(checkpoint, values).export(Path(target))


def state(backend: FSDPBackend) -> dict:
    moments = {f"optimizer.{name}": full(value) for name, value in backend._optimizer.tensors().items()}
    return full_state(backend._model) | moments


def save(checkpoint: str, directory: str, values: dict) -> dict:
    backend = made(checkpoint, values)
    copies = copies_of(values)
    packs = scored(backend, packs_of_this_rank(samples(), 128, copies), reference=True)
    backend.train_step(packs, LOSSES["grpo"], GRPO)
    CheckpointFolder(Path(directory), keep_last=1).write(1, lambda folder: backend.save(folder, 1))
    return state(backend)


def resume(checkpoint: str, directory: str, values: dict) -> tuple[dict, dict]:
    """What was loaded, and the gradients of the next step."""
    backend = made(checkpoint, values)
    latest = CheckpointFolder(Path(directory), keep_last=1).latest()
    assert latest is not None
    backend.load(latest)
    loaded = state(backend)
    gradients = keep_gradients(backend._optimizer)
    packs = packs_of_this_rank(samples(seed=1), 128, copies_of(values))
    backend.train_step(scored(backend, packs, reference=True), LOSSES["grpo"], GRPO)
    return loaded, dict(gradients)


RESUMES = {
    "tensor to plain and back": ("qwen3", [(4, tensor(2)), (2, {}), (2, tensor(2))]),
    "plain to tensor": ("qwen3", [(1, {}), (4, tensor(2))]),
    "context to plain and to tensor": ("qwen3", [(4, context(2)), (1, {}), (2, tensor(2)), (2, context(2))]),
    "expert to plain and to other sizes": ("qwen3_moe", [(4, expert(2)), (1, {}), (4, expert(4))]),
    "both to one": ("qwen3_moe", [(4, tensor(2, expert_parallel_size=4)), (2, expert(2))]),
}


@pytest.mark.parametrize("case", RESUMES)
def test_a_checkpoint_of_one_mesh_is_resumed_bitwise_on_another(checkpoints, tmp_path, case):
    family, [(world, values), *others] = RESUMES[case]
    [saved, *_] = spawn(world, save, checkpoints(family), str(tmp_path), values)
    wanted = None
    for other_world, other_values in others:
        for loaded, gradients in spawn(other_world, resume, checkpoints(family), str(tmp_path), other_values):
            assert loaded.keys() == saved.keys()
            assert all(torch.equal(loaded[name], saved[name]) for name in saved)
            wanted = wanted or gradients
            assert relative(gradients, wanted) < TOLERANCE


REFUSED = {
    "nothing to split": ("gpt_oss", tensor(2), "the plan of transformers splits 0% of the layers"),
    "packed experts": ("qwen3_moe", tensor(2), "deal the experts by --expert-parallel-size"),
    "heads": ("qwen3", tensor(4), "4 must divide the 2 key-value heads"),
    "no experts": ("qwen3", expert(2), "no plan that splits experts"),
    "a state": ("qwen3_next", context(2), "add --context-parallel-recurrent gather"),
    "experts": ("gpt_oss", expert(3), "3 must divide the 4 experts"),
}


def refused(checkpoint: str, values: dict) -> str:
    with pytest.raises(ConfigError) as raised:
        made(checkpoint, values)
    return str(raised.value)


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_does_not_divide_is_refused_by_one_line_on_every_rank(checkpoints, case):
    family, values, words = REFUSED[case]
    for line in spawn(max(values.values()), refused, checkpoints(family), values):
        assert words in line
        assert "\n" not in line
        assert next(iter(values)).replace("_", "-") in line
