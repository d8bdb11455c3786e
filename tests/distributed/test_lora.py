"""Adapters on real ranks against plain peft in one process: logprobs, gradients, files, merged weights, references.

Resumes, and one rank against several: test_laws.py.
"""

import copy
import dataclasses
from pathlib import Path

import peft
import pytest
import torch
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file

from fsdptrain.algo.losses import LOSSES
from fsdptrain.checkpoints import newest_checkpoint
from fsdptrain.errors import CheckpointError
from fsdptrain.fsdp.backend import FSDPBackend
from fsdptrain.fsdp.checkpoint_folder import CheckpointFolder
from fsdptrain.fsdp.optimizer_state import state_tensors
from fsdptrain.types import LossConfig
from tests import zoo
from tests.exact import Exact, backends_in_float64
from tests.tensors import load_files, same
from tests.testing import save_hub, spawn

from .lora_cases import CASES, backend_of, fill, logits, objective, plain, plain_gradients, plain_peft, trained
from .sharded import full_state
from .test_fsdp_backend import config, keep_gradients, packs_of_this_rank, samples

pytestmark = [  # peft asks for one, and advises against what its export needs
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning"),
]

ROUNDED = 4 * torch.finfo(torch.float32).eps  # gradients of adapters are float32
OF_ROUNDING = 4.0  # times the error of a merge by peft in float32
OFFLOADED = {"fsdp_cpu_offload": True}  # with checkpointing bitwise: test_laws.py
OPTIONS = {"experts": OFFLOADED, "transposed": OFFLOADED}
STATE = ("exp_avg", "exp_avg_sq", "step")


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    """A checkpoint of each architecture, and another one of qwen3."""
    folder = tmp_path_factory.mktemp("hub")
    for name in {architecture for architecture, _, _ in CASES.values()}:
        save_hub(zoo.build(name, seed=1), folder / name, max_shard_size="200KB")
    save_hub(zoo.build("qwen3", seed=5), folder / "other")
    return folder


def compute(hub: Path, target: Path):
    """For each case logprobs of this rank's packs, gradients, and the exports."""
    backends_in_float64()
    found = {}
    for case in CASES:
        backend = backend_of(str(hub), case, lora_export="both", **OPTIONS.get(case, {}))
        assert not any(value.any() for name, value in full_state(backend.model).items() if "lora_B" in name)
        fill(backend)
        gradients = keep_gradients(backend._optimizer)
        with Exact():
            packs = packs_of_this_rank(samples(), 128)
            scores = [
                s.values[p.loss_mask] for p, s in zip(packs, backend.compute_logprobs(packs, "policy"), strict=True)
            ]
        backend.export(target / case)
        assert same(dict(backend.hf_weights()), load_files(target / case))
        with Exact():
            backend.train_step(packs, objective, LossConfig())
        found[case] = (scores, gradients)
    return found


def test_forward_gradients_and_exports_are_those_of_plain_peft(hub: Path, tmp_path: Path):
    ranks = spawn(2, compute, hub, tmp_path)
    for case, (architecture, _, _) in CASES.items():
        theirs = plain_peft(hub / architecture, case).eval()
        with Exact():
            logprobs, gradients = plain_gradients(theirs, samples())
        for rank in ranks:
            assert distance(rank[case][1], gradients) < ROUNDED, case
        found = torch.cat([values for rank in ranks for values in rank[case][0]]).sort().values
        assert torch.allclose(found, torch.cat(logprobs).sort().values, rtol=0, atol=1e-12), case
        check_exports(hub / architecture, tmp_path / case, theirs, case)


def check_exports(stock: Path, exported: Path, theirs: peft.PeftModel, case: str) -> None:
    """The adapter is loaded by peft; the merged weights are as exact as those that peft merges."""
    saved = load_file(exported / "adapter" / "adapter_model.safetensors")
    assert saved.keys() == get_peft_model_state_dict(theirs).keys()
    reloaded = peft.PeftModel.from_pretrained(plain(stock), exported / "adapter").eval()
    with Exact():
        wanted = logits(theirs)
        assert torch.allclose(logits(reloaded), wanted, rtol=0, atol=1e-12), case
        assert not torch.allclose(logits(plain(stock)), wanted, atol=0.1), case
    exact, rounded = (
        copy.deepcopy(model).merge_and_unload().state_dict() for model in (theirs, copy.deepcopy(theirs).float())
    )
    merged = plain(exported).state_dict()
    assert merged.keys() == exact.keys()
    assert largest_difference(merged, exact) <= OF_ROUNDING * largest_difference(rounded, exact), case


def distance(found: dict, wanted: dict) -> float:
    """Of the tensor that differs most, relative to its norm."""
    assert found.keys() == wanted.keys()
    return max(((found[name] - wanted[name]).norm() / wanted[name].norm()).item() for name in wanted)


def largest_difference(found: dict, wanted: dict) -> float:
    return max((found[name].double() - wanted[name]).abs().max().item() for name in wanted)


def whole_backend(path: Path, **values) -> FSDPBackend:
    """One that trains all weights, unless `values` name an adapter."""
    return FSDPBackend(config(str(path), rollout_temperature=1.0, **values), total_steps=10)


def score(backend, role, packs):
    return torch.cat([found.values for found in backend.compute_logprobs(packs, role)])


def reference(hub: Path, case: str, other: str | None, values: dict):
    """Scores of the reference before training, and after a failure, a step and a resume; and of the model it is."""
    packs = packs_of_this_rank(samples(), 128)
    refs = {} if other is None else {"ref_load": str(hub / other)}
    backend = backend_of(str(hub), case, kl_loss_coef=0.1, lr=1e-2, **values, **refs)
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
    checkpoints = CheckpointFolder(hub / f"of {case}, {other}", keep_last=1)
    checkpoints.write(1, lambda path: backend.save(path, 1))
    backend.load(newest_checkpoint(checkpoints.directory.parent))
    after = score(backend, "reference", packs)
    moved = {name for name, value in full_state(backend.model).items() if not torch.equal(weights[name], value)}
    assert moved == set(trained(backend.model)), moved ^ set(trained(backend.model))
    assert (backend._reference is None) == (other is None and "whole" not in case)
    expected = score(whole_backend(hub / (other or CASES[case][0]), **values), "policy", packs)
    return before, after, expected


def continued(hub: Path):
    """A run that begins with the adapter of another one and takes the same steps; that policy is its reference."""
    packs = packs_of_this_rank(samples(), 128)
    one = backend_of(str(hub), "whole, tied")
    fill(one)
    one.export(hub / "adapter")
    other = whole_backend(hub / "qwen2", lora_init=str(hub / "adapter"), kl_loss_coef=0.1)
    expected, before = score(one, "policy", packs), score(other, "reference", packs)
    for backend in (one, other) * 2:
        backend.train_step(packs, objective, LossConfig())
    assert same(full_state(one.model), full_state(other.model))
    return before, score(other, "reference", packs), expected


def references(hub: Path):
    return [
        reference(hub, "experts", None, {"bf16": True, "fsdp_reshard_after_forward": False}),
        continued(hub),
        reference(hub, "whole, tied", None, {"bf16": True}),
        reference(hub, "dense", "other", {"bf16": False, "fsdp_cpu_offload": True, "gradient_checkpointing": True}),
    ]


def test_the_reference_is_bitwise_the_policy_at_the_start_and_only_the_adapter_is_trained(hub: Path):
    for found in spawn(2, references, hub):
        for before, after, expected in found:
            assert torch.equal(before, expected)
            assert torch.equal(after, expected)


def checkpoint_and_refusals(hub: Path, directory: Path):
    """dtypes of (frozen weights, adapters, Adam's moments); why others refuse a checkpoint; names of the trained."""
    backend = backend_of(str(hub), "whole, tied", bf16=True)
    fill(backend)
    backend.train_step(packs_of_this_rank(samples(), 128), objective, LossConfig())
    adapters = trained(backend.model)
    others = [p for name, p in backend.model.named_parameters() if name not in adapters]
    moments = [t for name, t in state_tensors(backend._optimizer).items() if "exp_avg" in name]
    assert state_tensors(backend._optimizer).keys() == {f"{n}.{key}" for n in adapters for key in STATE}
    checkpoints = CheckpointFolder(directory, keep_last=1)
    checkpoints.write(2, lambda folder: backend.save(folder, 2))
    refusals = []
    lora = backend_of(str(hub), "whole, tied", lora_alpha=7, bf16=True)
    for other in (lora, whole_backend(hub / "qwen2", bf16=True)):
        with pytest.raises(CheckpointError) as caught:
            other.load(newest_checkpoint(checkpoints.directory.parent))
        refusals.append(str(caught.value))
    return [{t.dtype for t in group} for group in (others, adapters.values(), moments)], refusals, {*adapters}


def test_a_checkpoint_holds_the_adapter_only_in_float32_and_is_refused_for_another_kind(hub: Path, tmp_path: Path):
    [(dtypes, (alpha, full_training), adapters)] = spawn(1, checkpoint_and_refusals, hub, tmp_path)
    assert dtypes == [{torch.bfloat16}, {torch.float32}, {torch.float32}]
    [folder] = (tmp_path / "checkpoints").iterdir()
    names = load_files(folder / "shards").keys()
    assert names == {f"model.{n}" for n in adapters} | {f"optimizer.{n}.{key}" for n in adapters for key in STATE}
    assert adapters == {"model.embed_tokens.weight"} | {name for name in adapters if ".lora_" in name}
    for line in (alpha, full_training):
        assert "of another model" in line
        assert "\n" not in line
    assert "alpha 6" in alpha
    assert "alpha 7" in alpha
    assert full_training.count("LoRA") == 1
