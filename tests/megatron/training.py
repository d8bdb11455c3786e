"""A backend that takes steps on one pack, and what it has then: in the ranks that a test spawns."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from fsdptrain.algo.losses import LOSSES
from fsdptrain.config import Config
from fsdptrain.fsdp.checkpoint_folder import CheckpointFolder
from fsdptrain.fsdp.optimizer_state import state_tensors
from fsdptrain.model.policy import plain_batch
from fsdptrain.types import LossConfig, PackedBatch
from tests.megatron import cases

SMALL = 1e-6  # a step of Adam that bfloat16 can show on few of the weights
KINDS = ("exp_avg", "exp_avg_sq")


def backend_of(folder: Path, *, bf16: bool = False, lr: float = 1e-3, **flags: Any) -> Any:
    from fsdptrain.megatron.backend import MegatronBackend

    options = {"bf16": bf16, "backend": "megatron", "lr": lr, "lr_decay_style": "constant", "weight_decay": 0.1}
    return MegatronBackend(Config(hf_checkpoint=str(folder), **options, **flags), total_steps=4)


def flags_of(split: Mapping[str, Any]) -> dict[str, Any]:
    return {f"megatron_{name}": value for name, value in split.items()}


def pack(rank: int) -> PackedBatch:
    segments = [cases.tokens(1, n, seed=10 * rank + n)[0].tolist() for n in (7, 12)]
    return replace(plain_batch(segments, device=torch.device("cpu")), advantages=torch.arange(19).sin())


def steps(backend: Any, count: int) -> list[float]:
    """Norms of the gradients."""
    from fsdptrain.megatron.groups import process_groups

    batch = pack(process_groups().dp_cp.rank())
    return [backend.train_step([batch], LOSSES["grpo"], LossConfig())["optim/grad_norm"] for _ in range(count)]


def whole_gradient(masters: Any) -> Callable[[str], Tensor]:
    """Gathers the gradient of a parameter, which `reduce_gradients` has set."""
    own = masters.named
    return lambda name: masters.whole(name, own[name].grad if name in own else None)


def masters(backend: Any) -> dict[str, Tensor]:
    stream = backend.weights.stream(dtype=torch.float32, of=backend._masters.whole_master)
    return {name: tensor.cpu() for name, tensor in stream}


def weights(backend: Any) -> dict[str, Tensor]:
    """In the compute dtype, as they are in the model."""
    return {name: tensor.cpu() for name, tensor in backend.weights.stream()}


def state(backend: Any) -> dict[str, Tensor]:
    """Masters and moments, whole, by names in the files."""
    own, found = state_tensors(backend._optimizer), masters(backend)
    for kind in KINDS:
        of = backend.weights.stream(
            dtype=torch.float32,
            of=lambda name, kind=kind: backend._masters.whole(name, own.get(f"{name}.{kind}")),
            only_parameters=True,
        )
        found |= {f"{kind} {name}": tensor.cpu() for name, tensor in of}
    return found


def train(folder: Path, checkpoint: Path, split: dict[str, int]) -> dict[str, Any]:
    """Three small steps in bfloat16, and a checkpoint of them."""
    backend = backend_of(folder, bf16=True, lr=SMALL, **flags_of(split))
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
