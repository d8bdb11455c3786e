"""Every optimizer on real ranks against torch in one process. Resumes: test_laws.py."""

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fsdptrain.algo.losses import LOSSES
from fsdptrain.config import OptimConfig
from fsdptrain.errors import ConfigError
from fsdptrain.fsdp.backend import FSDPBackend
from fsdptrain.fsdp.checkpoint_folder import CheckpointFolder
from fsdptrain.fsdp.mesh import build_mesh
from fsdptrain.fsdp.muon import _gathered_axis
from fsdptrain.fsdp.optimizer import Optimizer
from fsdptrain.fsdp.optimizer_state import state_tensors
from fsdptrain.fsdp.optimizers import find_optimizer
from fsdptrain.fsdp.wrap import shard_model
from fsdptrain.model.loading.fill import own_part
from fsdptrain.model.structure import repeated_layers
from fsdptrain.trainer.export import export_checkpoint
from fsdptrain.types import LossConfig
from tests import zoo
from tests.exact import Exact, backends_in_float64
from tests.matrix import only
from tests.tensors import load_files, same
from tests.testing import save_hub, save_tiny_checkpoint, spawn, tiny_qwen3

from .lora_cases import objective, plain, plain_gradients
from .sharded import SHARDING, full_state
from .test_fsdp_backend import config, packs_of_this_rank, samples

LR, DECAY, CLIP = 1e-2, 0.1, 2.0
FROZEN, SCALES = ["lm_head", r"layers\.0\."], {"q_proj": 3.0, "norm": 0.1}


def nadam(groups: list[dict[str, Any]], options: OptimConfig) -> torch.optim.Optimizer:
    """The function of a user. NAdam creates its state in its first step."""
    return torch.optim.NAdam(groups, lr=options.lr, eps=options.adam_eps, decoupled_weight_decay=True)


def adamw_of(params: list[nn.Parameter], **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=LR, betas=(0.9, 0.95), eps=1e-8, **options)


def by_kind(model: Any) -> tuple[list, list, list]:
    inside = {p for layer in repeated_layers(model) for p in layer.parameters()}
    matrices = [p for p in inside if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim >= 2 and p not in inside]
    return matrices, others, [p for p in model.parameters() if p.ndim < 2]


def references(model: Any, name: str) -> list[torch.optim.Optimizer]:
    """Stock optimizers over the plain `model`."""
    matrices, others, vectors = by_kind(model)
    groups = [{"params": matrices + others, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    if name == "muon":
        experts = [p for p in matrices if p.ndim == 3]
        flat = [p for p in matrices if p.ndim == 2] + [x for p in experts for x in experts_of(p)]
        adjust = {"adjust_lr_fn": "match_rms_adamw"}
        groups = [{"params": others, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
        return [torch.optim.Muon(flat, lr=2 * LR, weight_decay=DECAY, **adjust), adamw_of(groups)]
    if name == "sgd":
        return [torch.optim.SGD(groups, lr=LR)]
    return [adamw_of(groups)] if name == "adamw" else [nadam(groups, OptimConfig(lr=LR))]


def experts_of(stack: nn.Parameter) -> list[nn.Parameter]:
    """Views of the experts, with views of the gradients."""
    found = [nn.Parameter(x) for x in stack.detach().unbind()]
    for p, gradient in zip(found, stack.grad.unbind(), strict=True):
        p.grad = gradient
    return found


CASES: dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]] = {  # ranks, model, its sizes, options
    "adamw": (2, "adamw", {"intermediate_size": 129}, {}),
    "muon": (2, "muon", {"intermediate_size": 129}, {"muon_lr": 2 * LR}),
    "muon, experts": (2, "muon", {"num_experts": 6}, {"muon_lr": 2 * LR}),
    "muon, experts cut along columns": (4, "muon", {"num_experts": 6}, {"muon_lr": 2 * LR}),
    "muon, replicas": (4, "muon", {"intermediate_size": 129}, {"muon_lr": 2 * LR}),
    "sgd": (2, "sgd", {"intermediate_size": 129}, {}),
    "a user's": (2, f"{__name__}:nadam", {"intermediate_size": 129}, {}),
}


def compare(case: str) -> tuple[float, float]:
    """Two steps; the largest difference of a weight, and of a weight of stacked experts."""
    _, name, sizes, options = CASES[case]
    plain = (zoo.build("qwen3_moe", **sizes) if "num_experts" in sizes else tiny_qwen3(**sizes)).double()
    sharded = copy.deepcopy(plain)
    shard_model(sharded, build_mesh(2 if case == "muon, replicas" else 1), compute_dtype=plain.dtype, **SHARDING)
    config = OptimConfig(optimizer=name, lr=LR, weight_decay=DECAY, clip_grad=CLIP, **options)
    optimizer = Optimizer(sharded, config, total_steps=10, fp16=False)
    stock: list[torch.optim.Optimizer] = []
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        for p, own in zip(plain.parameters(), sharded.parameters(), strict=True):
            gradient = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            p.grad = gradient if p.grad is None else p.grad.copy_(gradient)
            own.grad = own_gradient(p.grad, own)
        nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
        optimizer.clip()
        optimizer.step()
        stock = stock or references(plain, name)
        for reference in stock:
            reference.step()
    found, experts = full_state(sharded), [0.0]
    differences = {n: (p - found[n]).abs().max().item() for n, p in plain.named_parameters()}
    experts += [differences.pop(n) for n, p in plain.named_parameters() if p.ndim == 3]
    return max(differences.values()), max(experts)


def own_gradient(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    assert isinstance(like, DTensor)
    part = own_part(whole, like).clone()
    return DTensor.from_local(part, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())


@pytest.mark.parametrize("case", only(["adamw", "muon", "muon, experts", "sgd", "a user's"], CASES))
def test_steps_on_shards_are_those_of_torch_on_the_whole_model(case: str) -> None:
    for difference, of_experts in spawn(CASES[case][0], compare, case):
        assert difference < 1e-12
        # torch computes with mm and this package with bmm, in bfloat16: of updates of size 0.2 lr, some roundings
        assert of_experts < 2 * LR * 0.2 * 10 / 2**8


def train_in_part(checkpoint: str) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Weights after two steps at falling learning rates, and the names of the parameters with a state."""
    backends_in_float64()
    values = {"freeze": FROZEN, "lr_scale": SCALES, "lr_decay_style": "linear", "lr_decay_iters": 4, "adam_eps": 0.01}
    backend = FSDPBackend(config(checkpoint, weight_decay=DECAY, rollout_temperature=1.0, **values), total_steps=10)
    with Exact():
        for seed in range(2):
            backend.train_step(packs_of_this_rank(samples(seed=seed), 96), objective, LossConfig())
    return full_state(backend.model), {name.rpartition(".")[0] for name in state_tensors(backend._optimizer)}


def test_frozen_parameters_and_learning_rates_by_name_are_those_of_torch(tmp_path: Path) -> None:
    """The frozen head is tied to the embedding. Clipping shows that the norm is of the trained parameters."""
    save_hub(zoo.build("qwen2"), tmp_path / "model")
    model = plain(tmp_path / "model")
    trained = {name: p for name, p in model.named_parameters() if "embed" not in name and "layers.0." not in name}
    factors = [next((factor for part, factor in SCALES.items() if part in name), 1.0) for name in trained]
    groups = [
        {"params": [p], "weight_decay": DECAY * (p.ndim > 1), "lr": LR * factor}
        for p, factor in zip(trained.values(), factors, strict=True)
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=0.01)
    for seed in range(2):
        with Exact():
            plain_gradients(model, samples(seed=seed))
            nn.utils.clip_grad_norm_(trained.values(), 0.5)
            optimizer.step()
        model.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] *= 0.75  # the schedule
    for weights, with_state in spawn(2, train_in_part, str(tmp_path / "model")):
        assert with_state == trained.keys()
        for name, p in model.named_parameters():
            assert (weights[name] - p).abs().max() <= 1e-11 * (name in trained)


def refusal_of_two_axes() -> str:
    mesh = init_device_mesh("cpu", (2, 2))
    p = DTensor.from_local(torch.zeros(2, 8), mesh, [_StridedShard(0, split_factor=2), Shard(0)], run_check=False)
    with pytest.raises(ConfigError) as caught:
        _gathered_axis(p)
    return str(caught.value)


def test_matrices_that_are_divided_along_two_axes_are_refused() -> None:
    assert all("along two axes" in line for line in spawn(4, refusal_of_two_axes))


def save_a_step(checkpoint: str, folder: str, values: dict[str, Any]) -> dict[str, torch.Tensor]:
    backend = FSDPBackend(config(checkpoint, **values), total_steps=10)
    backend.train_step(packs_of_this_rank(samples(8), 96), LOSSES["grpo"], LossConfig())
    CheckpointFolder(Path(folder), keep_last=1).write(1, lambda path: backend.save(path, 1))
    return full_state(backend.model)


@pytest.mark.parametrize("values", [{"optimizer": "muon", "fp8": True}, {"optimizer": f"{__name__}:nadam"}])
def test_a_run_is_exported_without_its_optimizer_and_without_torchao(tmp_path, monkeypatch, values) -> None:
    checkpoint = save_tiny_checkpoint(tmp_path / "model")
    [trained] = spawn(1, save_a_step, str(checkpoint), str(tmp_path), values)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"hf_checkpoint": str(checkpoint), "bf16": False} | values))
    [step] = (tmp_path / "checkpoints").glob("step_*")
    (step / "progress.json").write_text('{"step": 1}')
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, __name__, None)
    export_checkpoint(step, tmp_path / "hf")
    exported = load_files(tmp_path / "hf")
    assert same({name: trained[name] for name in exported}, exported)


def test_a_function_that_cannot_be_called_is_refused_by_name() -> None:
    for name, reason in [(f"{__name__}:samples_", "samples_"), (f"{__name__}:adamw_of", "has the signature")]:
        with pytest.raises(ConfigError, match=f"--optimizer {name}.*{reason}"):
            find_optimizer(OptimConfig(optimizer=name))
