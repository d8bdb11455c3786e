"""Text prompts on a vision-language checkpoint: the tower is frozen, sharded, and exported unchanged."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from fsdptrain.config import Config
from fsdptrain.data.packing.pack import pack
from fsdptrain.model.structure import decoder_layers, freeze_vision, tower_layers
from fsdptrain.types import LossConfig, Prompt, Sample, SamplingParams
from tests import agreement
from tests import vision_zoo as zoo
from tests.exact import Exact, backends_in_float64, in_float64
from tests.tensors import load_files
from tests.testing import spawn

from .test_fsdp_backend import keep_gradients
from .test_vision import TOLERANCE, TOTALS, loss, plain_loss


def samples() -> list[Sample]:
    """One response holds the token that stands for an image."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for number, length in enumerate((9, 30, 14, 21)):
        ids = torch.randint(5, 260, (length,), generator=generator).tolist()
        ids[-3] = zoo.IMAGE_TOKEN_ID if number == 1 else ids[-3]
        mask = [False] * (length - 5) + [True] * 5
        made.append(Sample(f"p{number}", ids, mask, [0.0] * length, advantage=number - 1.5))
    return made


def one_run(folder: Path) -> dict[str, Any]:
    options = {"bf16": False, "lr": 1e-2, "kl_loss_coef": 0.1, "clip_grad": 0.0}
    config = Config(hf_checkpoint=str(folder), rollout_engine="hf", **options)
    backend, engine = agreement.build(config)
    found: dict[str, Any] = {"sharded": all(isinstance(x, FSDPModule) for x in tower_layers(backend.model))}
    found["layers"] = len(tower_layers(backend.model)), len(decoder_layers(backend.model))
    found["optimized"] = len(backend._optimizer.tensors()) // 3
    backend.export(folder.parent / f"same-{folder.name}")
    found["gradients"] = keep_gradients(backend._optimizer)
    with Exact():
        mine = samples()[dist.get_rank() :: dist.get_world_size()]
        packs = [pack(mine, aggregation="token_mean", totals=TOTALS, max_response_len=5)]
        before = backend.compute_logprobs(packs, "policy")[0].values
        backend.train_step(packs, loss, LossConfig())
        found["moved"] = (backend.compute_logprobs(packs, "policy")[0].values - before).abs().max().item()
        found["reference"] = (backend.compute_logprobs(packs, "reference")[0].values - before).abs().max().item()
    backend.export(folder.parent / f"trained-{folder.name}")
    prompts = [Prompt(f"{i}", [5 + i] * length, "") for i, length in enumerate([3, 17])]
    sampling = SamplingParams(num_samples=2, max_tokens=12)
    found["agreement"] = agreement.push_and_compare(backend, engine, prompts, sampling, mode=Exact)
    return found


def all_runs(folders: list[Path]) -> list[dict[str, Any]]:
    backends_in_float64()
    return [one_run(folder) for folder in folders]


def plain_gradients(name: str) -> dict[str, Tensor]:
    model = in_float64(zoo.build(name))
    freeze_vision(model)
    with Exact():
        for sample in samples():
            plain_loss(name, model, sample, None).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.matrix
def test_text_trains_the_language_model_only(tmp_path: Path):
    folders = [zoo.save(tmp_path / name, name) for name in zoo.FAMILIES]
    for name, folder, found in zip(zoo.FAMILIES, folders, spawn(2, all_runs, folders)[0], strict=True):
        assert found["sharded"]
        assert found["layers"] == (2, 2)
        wanted = plain_gradients(name)
        assert found["gradients"].keys() == wanted.keys()
        assert found["optimized"] == len(wanted)
        largest = max(gradient.abs().max() for gradient in wanted.values())
        assert max((found["gradients"][key] - wanted[key]).abs().max() / largest for key in wanted) < TOLERANCE, name
        assert found["moved"] > 1e-3
        assert found["reference"] == 0.0
        assert found["agreement"] < 1e-12

        before = load_files(folder)
        same, trained = (load_files(tmp_path / f"{kind}-{name}") for kind in ("same", "trained"))
        assert before.keys() == same.keys() == trained.keys()
        assert all(torch.equal(before[key], same[key]) for key in before)
        changed = {key for key in before if not torch.equal(before[key], trained[key])}
        assert changed
        assert not any("vis" in key or "projector" in key for key in changed)
