"""Training in bfloat16: float32 masters that are dealt over ranks, keep what bfloat16 would lose, travel bitwise."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fsdptrain.algo.losses import LOSSES
from fsdptrain.config import Config
from fsdptrain.fsdp.checkpoint import CheckpointFolder
from fsdptrain.models.policy import plain_batch
from fsdptrain.testing import spawn
from fsdptrain.types import LossConfig, PackedBatch
from tests.megatron import cases

SMALL = 1e-6  # a step of Adam that bfloat16 can show on few of the weights
KINDS = ("exp_avg", "exp_avg_sq")


def backend_of(folder: Path, *, bf16: bool, lr: float, **layout: int) -> Any:
    from fsdptrain.backends.megatron.backend import MegatronBackend

    flags: dict[str, Any] = {f"megatron_{name}": size for name, size in layout.items()}
    options = {"bf16": bf16, "backend": "megatron", "lr": lr, "lr_decay_style": "constant", "weight_decay": 0.1}
    return MegatronBackend(Config(hf_checkpoint=str(folder), **options, **flags), total_steps=4)


def pack(rank: int) -> PackedBatch:
    batch = plain_batch(
        [cases.tokens(1, n, seed=10 * rank + n)[0].tolist() for n in (7, 12)], device=torch.device("cpu")
    )
    return replace(batch, advantages=torch.arange(19).sin())


def steps(backend: Any, count: int) -> list[float]:
    """Norms of the gradients."""
    from fsdptrain.backends.megatron.groups import Groups

    batch = pack(Groups.present().data.rank())
    return [backend.train_step([batch], LOSSES["grpo"], LossConfig())["optim/grad_norm"] for _ in range(count)]


def masters(backend: Any) -> dict[str, Tensor]:
    stream = backend.weights.stream(dtype=torch.float32, of=backend._masters.whole_master)
    return {name: tensor.cpu() for name, tensor in stream}


def weights(backend: Any) -> dict[str, Tensor]:
    """In the compute dtype, as they are in the model."""
    return {name: tensor.cpu() for name, tensor in backend.weights.stream()}


def state(backend: Any) -> dict[str, Tensor]:
    """Masters and moments, whole, by names in the files."""
    own, found = backend._optimizer.tensors(), masters(backend)
    for kind in KINDS:
        of = backend.weights.stream(
            dtype=torch.float32,
            of=lambda name, kind=kind: backend._masters.whole(name, own.get(f"{name}.{kind}")),
            only_parameters=True,
        )
        found |= {f"{kind} {name}": tensor.cpu() for name, tensor in of}
    return found


def train(folder: Path, checkpoint: Path, layout: dict[str, int]) -> dict[str, Any]:
    backend = backend_of(folder, bf16=True, lr=SMALL, **layout)
    files, before = load_file(folder / "model.safetensors"), weights(backend)
    begun = masters(backend)
    norms = steps(backend, 3)
    now, rounded = masters(backend), weights(backend)
    CheckpointFolder(checkpoint, keep_last=1).write(3, lambda path: backend.save(path, 3))
    return {
        "files": all(torch.equal(begun[name], files[name]) for name in files) and begun.keys() == files.keys(),
        "dtypes": {str(tensor.dtype) for tensor in before.values()},
        "rounded": all(torch.equal(now[name].bfloat16(), rounded[name]) for name in files),
        "moved": share(begun, now),
        "shown": share(before, rounded),
        "owned": sum(p.numel() for p in backend._masters.named.values()),
        "held": sum(p.numel() for p in backend._model.parameters()),
        "norms": norms,
        "state": state(backend),
    }


def share(before: dict[str, Tensor], after: dict[str, Tensor]) -> float:
    changed = sum(int((before[name] != after[name]).sum()) for name in before)
    return changed / sum(tensor.numel() for tensor in before.values())


def resume(folder: Path, checkpoint: Path, layout: dict[str, int]) -> dict[str, Tensor]:
    backend = backend_of(folder, bf16=True, lr=SMALL, **layout)
    assert backend.load(checkpoint / "checkpoints" / "step_00000003") == 3
    rounded = weights(backend)
    assert all(torch.equal(tensor.bfloat16(), rounded[name]) for name, tensor in masters(backend).items())
    return state(backend)


def norms_of(folder: Path, bf16: bool) -> list[float]:
    return steps(backend_of(folder, bf16=bf16, lr=1e-3, expert_parallel=2), 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cases.save("qwen3_moe", tmp_path_factory.mktemp("hub") / "moe")


@pytest.fixture(scope="module")
def trained(model: Path) -> list[dict[str, Any]]:
    return spawn(2, train, model, model.parent / "run", {"expert_parallel": 2}, timeout=300.0)


def test_masters_begin_as_the_files_are_and_the_model_is_their_rounding(trained) -> None:
    for rank in trained:
        assert rank["files"]
        assert rank["dtypes"] == {"torch.bfloat16"}
        assert rank["rounded"]


def test_steps_that_bfloat16_cannot_show_are_not_lost(trained) -> None:
    assert trained[0]["moved"] > 0.9
    assert trained[0]["shown"] < 0.1


def test_each_rank_owns_its_part_of_masters_and_moments(trained) -> None:
    """Half of what both have; an expert belongs to one of them."""
    owned, held = (sum(rank[kind] for rank in trained) for kind in ("owned", "held"))
    experts = sum(t.numel() for name, t in trained[0]["state"].items() if ".experts." in name and name[:3] != "exp")
    assert owned == (held + experts) // 2


def test_masters_and_moments_travel_bitwise_to_another_split(trained, model: Path) -> None:
    (found,) = spawn(1, resume, model, model.parent / "run", {}, timeout=300.0)
    wanted = trained[0]["state"]
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def test_gradients_are_those_of_float32_but_for_rounding(model: Path) -> None:
    half, single = (spawn(2, norms_of, model, bf16, timeout=300.0)[0] for bf16 in (True, False))
    assert half == pytest.approx(single, rel=3e-2)
    assert half != pytest.approx(single, rel=1e-5)
