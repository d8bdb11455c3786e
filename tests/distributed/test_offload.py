"""Whatever is moved to the host, or computed again, on real ranks: gradients, weights and checkpoints are bitwise those
without, with several packs, clipping, replicas, experts, an adapter and half precision."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdptrain.algo.losses import LOSSES
from fsdptrain.features.moe.feature import MoEFeature
from fsdptrain.fsdp import host_adam
from fsdptrain.fsdp.backend import FSDPBackend
from fsdptrain.fsdp.checkpoint_folder import CheckpointFolder
from fsdptrain.types import LossConfig
from tests import zoo
from tests.matrix import only
from tests.tensors import same
from tests.testing import save_tiny_checkpoint, spawn

from .sharded import full, full_state
from .test_fsdp_backend import config, keep_gradients, packs_of_this_rank, samples, skip
from .test_moe import with_routes

OPTIMIZER = {
    "optimizer, host": {"offload_optimizer": True},
    "optimizer, device": {"offload_optimizer": True, "offload_optimizer_step": "device"},
}
LAYERS = {
    "activations": {"offload_activations": True},
    "inputs": {"offload_activations": True, "gradient_checkpointing": True},
    "selective": {"gradient_checkpointing": True, "gradient_checkpointing_kind": "selective"},
    "every second": {"gradient_checkpointing": True, "gradient_checkpointing_every": 2, "offload_activations": True},
}
BOTH = {"both": OPTIMIZER["optimizer, device"] | LAYERS["inputs"]}
ALL = OPTIMIZER | LAYERS | BOTH
FEW = BOTH | {name: ALL[name] for name in ("optimizer, host", "activations", "selective")}
MOE: dict[str, Any] = {"router_replay": "rollout", "router_aux_loss_coef": 0.3}
SETTINGS: dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]] = {
    "few": (2, "qwen3", {"kl_loss_coef": 0.1, "lr_decay_style": "cosine"}, BOTH | {"selective": LAYERS["selective"]}),
    "packs": (2, "qwen3", {"kl_loss_coef": 0.1, "lr_decay_style": "cosine"}, ALL),
    "replicas": (4, "qwen3", {"fsdp_replicate_size": 2, "fsdp_reshard_after_forward": False}, FEW),
    "experts": (2, "qwen3_moe", MOE, ALL),
    "adapter": (2, "qwen3", {"lora_rank": 4, "bf16": True}, FEW),
    "fp16": (2, "qwen3", {"fp16": True}, FEW),
    "cpu offload": (2, "qwen3", {"fsdp_cpu_offload": True}, LAYERS),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    zoo.build("qwen3_moe", num_experts=6).save_pretrained(folder / "qwen3_moe")
    save_tiny_checkpoint(folder / "qwen3", num_hidden_layers=4)
    return {name: str(folder / name) for name in ("qwen3", "qwen3_moe")}


def steps(backend: FSDPBackend, seeds: range) -> tuple[list[dict], list[dict]]:
    """The gradients of optimizer steps of several packs, and their metrics."""
    clip = backend._optimizer.clip
    found = keep_gradients(backend._optimizer)
    gradients, history = [], []
    for seed in seeds:
        items = samples(8, seed=seed)
        routed = with_routes(items) if backend.features.find(MoEFeature) else items
        history.append(backend.train_step(packs_of_this_rank(routed, 96), LOSSES["grpo"], LossConfig()))
        gradients.append(dict(found))
    backend._optimizer.clip = clip
    return gradients, history


def state(backend: FSDPBackend) -> dict[str, torch.Tensor]:
    moments = {f"optimizer.{name}": t for name, t in backend._optimizer.tensors().items()}
    return full_state(backend.model) | {name: full(t) for name, t in moments.items()}


def every_kind(checkpoint: str, options: dict, kinds: dict, folder: str) -> list[str]:
    """What differs from a run without, by kind; each resumes from the checkpoint of the one before it."""
    host_adam.PIECE = 1024  # several pieces of each parameter
    differing: list[str] = []
    plain = FSDPBackend(config(checkpoint, **options), total_steps=10)
    first, middle = steps(plain, range(2)), state(plain)
    checkpoints = CheckpointFolder(Path(folder), keep_last=2)  # of this kind, and of the one before
    checkpoints.write(2, lambda path: plain.save(path, 2))
    second, end = steps(plain, range(2, 4)), state(plain)
    for step, (name, values) in enumerate(kinds.items(), start=3):
        backend = FSDPBackend(config(checkpoint, **options, **values), total_steps=10)
        results: dict[str, Any] = {"first steps": steps(backend, range(2)), "state": state(backend)}
        latest = checkpoints.latest()
        assert latest is not None
        checkpoints.write(step, lambda path, backend=backend: backend.save(path, 2))
        steps(backend, range(9, 10))  # to be forgotten
        backend.load(latest)
        results["loaded"] = state(backend)
        backend.offload()
        backend.onload()
        results["later steps"], results["end"] = steps(backend, range(2, 4)), state(backend)
        wanted = {"first steps": first, "state": middle, "loaded": middle, "later steps": second, "end": end}
        differing += [f"{name}: {what}" for what in wanted if not equal(results[what], wanted[what])]
    return differing


def equal(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return same(found, wanted)
    gradients, history = wanted
    return history == found[1] and all(itertools.starmap(same, zip(found[0], gradients, strict=True)))


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("setting", only(["few"], SETTINGS))
def test_no_bit_depends_on_what_is_on_the_host_or_computed_again(checkpoints, tmp_path, setting):
    world, name, options, kinds = SETTINGS[setting]
    for differing in spawn(world, every_kind, checkpoints[name], options, kinds, str(tmp_path)):
        assert differing == []


@pytest.mark.parametrize("kind", OPTIMIZER)
def test_a_skipped_step_moves_nothing_on_the_host(checkpoints, kind):
    results = spawn(2, skip, checkpoints["qwen3"], math.inf, {"fp16": True, **OPTIMIZER[kind]})
    assert results[0] == results[1]
    metrics, scale, halved, following = results[0]
    assert halved == scale / 2
    assert metrics["optim/skipped_steps"] == following["optim/skipped_steps"] == 1
