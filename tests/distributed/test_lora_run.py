"""A run with an adapter: its reference, its checkpoints, and its first step against full training."""

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from fsdptrain.algo.losses import LOSSES
from fsdptrain.errors import CheckpointError
from fsdptrain.features.lora.feature import LoraFeature
from fsdptrain.fsdp.backend import FSDPBackend
from fsdptrain.fsdp.checkpoint_folder import CheckpointFolder
from fsdptrain.fsdp.shards import local_shard
from fsdptrain.model.loading.materialize import own_part
from fsdptrain.model.structure import reshard
from fsdptrain.types import LossConfig
from tests.exact import Exact, backends_in_float64
from tests.tensors import relative
from tests.testing import spawn

from .lora_cases import CASES, backend_of, fill, objective, trained, write_checkpoint
from .sharded import full, full_state
from .test_fsdp_backend import config, keep_gradients, packs_of_this_rank, samples

CHECKPOINTS = {"qwen3": ("qwen3", 1), "qwen3_moe": ("qwen3_moe", 1), "other": ("qwen3", 5)}


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    for name, (architecture, seed) in CHECKPOINTS.items():
        write_checkpoint(architecture, folder / name, seed)
    return folder


def whole_backend(path: Path, **values) -> FSDPBackend:
    """One that trains all weights."""
    return FSDPBackend(config(str(path), rollout_temperature=1.0, **values), total_steps=10)


def score(backend, role, packs):
    return torch.cat([found.values for found in backend.compute_logprobs(packs, role)])


def reference(hub: str, case: str, other: str | None, values: dict):
    """Scores of the reference before training, after a failure and after training; and of the model that it is."""
    packs = packs_of_this_rank(samples(), 128)
    refs = {} if other is None else {"ref_load": str(Path(hub) / other)}
    backend = backend_of(hub, case, kl_loss_coef=0.1, lr=1e-2, **values, **refs)
    fill(backend)
    weights = full_state(backend.model)
    policy, before = score(backend, "policy", packs), score(backend, "reference", packs)
    broken = dataclasses.replace(packs[0], labels=torch.full_like(packs[0].labels, 10**6))
    with pytest.raises((IndexError, RuntimeError)):
        backend.compute_logprobs([packs[0], broken], "reference")
    assert torch.equal(score(backend, "policy", packs), policy)
    assert not torch.equal(before, policy)
    assert all(torch.equal(weights[name], value) for name, value in full_state(backend.model).items())
    backend.train_step(packs, LOSSES["grpo"], LossConfig())
    checkpoints = CheckpointFolder(Path(hub) / f"of {case}, {other}", keep_last=1)
    checkpoints.write(1, lambda path: backend.save(path, 1))
    latest = checkpoints.latest()
    assert latest is not None
    backend.load(latest)
    after = score(backend, "reference", packs)
    moved = {name for name, value in full_state(backend.model).items() if not torch.equal(weights[name], value)}
    assert moved == set(trained(backend.model)), moved ^ set(trained(backend.model))
    assert (backend._reference is None) == (other is None)
    expected = score(whole_backend(Path(hub) / (other or CASES[case][0]), **values), "policy", packs)
    return before, after, expected


REFERENCES = [
    ("dense", None, {"bf16": True, "gradient_checkpointing": True}),
    ("experts", None, {"bf16": False, "fsdp_reshard_after_forward": False}),
    ("dense", "other", {"bf16": True, "fsdp_cpu_offload": True}),
]


def references(hub: str):
    return [reference(hub, *options) for options in REFERENCES]


def test_the_reference_is_bitwise_the_model_without_its_adapter_and_only_that_is_trained(hub):
    for found in spawn(2, references, str(hub)):
        for before, after, expected in found:
            assert torch.equal(before, expected)
            assert torch.equal(after, expected)


STATE = ("exp_avg", "exp_avg_sq", "step")


def storage(hub: str):
    """dtypes of (frozen weights, adapters, Adam's moments), and the norms of gradients in bf16 and in float32."""
    norms, dtypes = [], []
    for bf16 in (True, False):
        backend = backend_of(hub, "dense", bf16=bf16)
        fill(backend)
        adapters = trained(backend.model)
        others = [p for name, p in backend.model.named_parameters() if name not in adapters]
        moments = [t for name, t in backend._optimizer.tensors().items() if "exp_avg" in name]
        dtypes.append([{t.dtype for t in group} for group in (others, adapters.values(), moments)])
        norms.append(backend.train_step(packs_of_this_rank(samples(), 128), objective, LossConfig())["optim/grad_norm"])
        assert backend._optimizer.tensors().keys() == {f"{n}.{key}" for n in adapters for key in STATE}
    return dtypes, norms


def test_frozen_weights_are_stored_in_the_compute_dtype_and_adapters_in_float32(hub):
    [(dtypes, norms)] = spawn(1, storage, str(hub))
    assert dtypes == [
        [{torch.bfloat16}, {torch.float32}, {torch.float32}],
        [{torch.float32}, {torch.float32}, {torch.float32}],
    ]
    assert norms[0] == pytest.approx(norms[1], rel=0.02)


ROUNDED = 4 * torch.finfo(torch.float32).eps  # adapters and their gradients are float32
SPANNING = 128  # at least the columns of every linear layer


def spanning(hub: str):
    """Gradients and weights after one step: of all weights, and of adapters whose A has orthonormal columns."""
    backends_in_float64()
    values = {"lr": 1e-2, "adam_eps": 0.01, "clip_grad": 0.0, "bf16": False}
    with Exact():
        packs = packs_of_this_rank(samples(), 128)
    found = []
    whole = whole_backend(Path(hub) / "qwen3", **values)
    adapted = backend_of(hub, "dense", lora_rank=SPANNING, lora_alpha=SPANNING, **values)
    reshard(adapted.model)
    with torch.no_grad():
        for name, p in trained(adapted.model).items():
            if "lora_A" in name:
                local_shard(p).copy_(own_part(torch.eye(*p.shape), p))
    for backend in (whole, adapted):
        gradients = keep_gradients(backend._optimizer)
        with Exact():
            backend.train_step(packs, objective, LossConfig())
        found.append((dict(gradients), {name: t.clone() for name, t in backend.hf_weights("module")}))
    return found, list(adapted.features.find(LoraFeature).adapters.layers)


def test_an_adapter_that_spans_everything_takes_the_same_first_step_as_the_weights_themselves(hub):
    """y = W x + s B A x, so dL/dB = s dL/dW A^T and, where B = 0, dL/dA = 0.

    With s = 1 and A = [I; 0] of rank >= columns: dL/dB = [dL/dW, 0]. Adam looks at each number by itself, so B becomes
    what W changes by, A does not move, and the merged weight W + B A is the fully trained one, in every linear layer.
    """
    for (whole, adapted), names in spawn(2, spanning, str(hub)):
        for name in names:
            gradient = whole[0][name]
            of_b = adapted[0][name.replace(".weight", ".lora_B.default.weight")]
            of_a = adapted[0][name.replace(".weight", ".lora_A.default.weight")]
            assert relative({"": of_b[:, : gradient.shape[1]]}, {"": gradient}) < ROUNDED
            assert not of_b[:, gradient.shape[1] :].any()
            assert not of_a.any()
        assert relative({n: adapted[1][n] for n in names}, {n: whole[1][n] for n in names}) < ROUNDED


def everything(backend):
    return full_state(backend.model) | {name: full(t) for name, t in backend._optimizer.tensors().items()}


def train(backend, count: int):
    packs = packs_of_this_rank(samples(), 128)
    metrics = [backend.train_step(packs, LOSSES["grpo"], LossConfig()) for _ in range(count)]
    return metrics, everything(backend), {name: t.clone() for name, t in backend.hf_weights("hub")}


RUN = {"lr": 1e-2, "lr_decay_style": "cosine", "bf16": True}


def save_and_go_on(hub: str, directory: str):
    backend = backend_of(hub, "dense", **RUN)
    train(backend, 2)
    CheckpointFolder(Path(directory), keep_last=1).write(2, lambda folder: backend.save(folder, 2))
    return train(backend, 2)


def load_and_go_on(hub: str, directory: str):
    backend = backend_of(hub, "dense", seed=7, **RUN)  # another start, to be forgotten
    assert backend.load(CheckpointFolder(Path(directory), keep_last=1).latest()) == 2
    return train(backend, 2)


def refusals(hub: str, directory: str):
    latest = CheckpointFolder(Path(directory), keep_last=1).latest()
    backend = backend_of(hub, "dense", **RUN)
    assert backend.load(latest) == 2  # what two ranks have written, on one
    shown = []
    others = [
        backend_of(hub, "dense", lora_alpha=7, **RUN),
        backend_of(hub, "dense", "other", **RUN),
        whole_backend(Path(hub) / "qwen3", **RUN),
    ]
    for backend in others:
        with pytest.raises(CheckpointError) as caught:
            backend.load(latest)
        shown.append(str(caught.value))
    return shown


def test_a_checkpoint_holds_the_adapter_only_resumes_bitwise_and_refuses_another_base(hub, tmp_path):
    whole = spawn(2, save_and_go_on, str(hub), str(tmp_path))
    resumed = spawn(2, load_and_go_on, str(hub), str(tmp_path))
    for one, other in zip(whole, resumed, strict=True):
        assert one[0] == other[0]
        for ours, theirs in zip(one[1:], other[1:], strict=True):
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    [folder] = (tmp_path / "checkpoints").iterdir()
    names = set()
    for path in (folder / "shards").iterdir():
        with safe_open(path, framework="pt") as file:
            names |= set(file.keys())
    adapters = {name for name in names if name.startswith("model.")}
    assert names == adapters | {f"optimizer.{n.removeprefix('model.')}.{key}" for n in adapters for key in STATE}
    assert all(".lora_A." in name or ".lora_B." in name for name in adapters)
    assert len(adapters) == 2 * 2 * 7
    [(alpha, base, full_training)] = spawn(1, refusals, str(hub), str(tmp_path))
    for line in (alpha, base, full_training):
        assert "of another model" in line
        assert "\n" not in line
    assert "alpha 6" in alpha
    assert "alpha 7" in alpha
    assert base.count("LoRA of rank 4, alpha 6 on weights") == 2
    assert full_training.count("LoRA") == 1
