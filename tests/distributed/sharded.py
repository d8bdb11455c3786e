"""Small sharded models: the same weights on any number of ranks, with and without a loader."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from fsdptrain.fsdp.mesh import build_mesh
from fsdptrain.fsdp.wrap import shard_model
from fsdptrain.model.loading import meta
from fsdptrain.model.loading.meta import build_meta_model, load_weights
from fsdptrain.model.structure import reshard
from tests.testing import tiny_qwen3

SHARDING: dict[str, Any] = {"cpu_offload": False, "reshard_after_forward": True}


def load_sharded(
    path: Path | str, *, weights: Path | str | None = None, replicas: int = 1, whole: bool = False, **options: bool
) -> PreTrainedModel:
    """Load the checkpoint `path` in float32, with `weights` of another one. `options` are those of SHARDING.

    whole: rank 0 reads whole tensors.
    """
    model = build_meta_model(Path(path), trust_remote_code=False, attn_implementation="eager").eval()
    options = SHARDING | options
    shard_model(model, build_mesh(replicas), compute_dtype=torch.float32, **options)
    with mock.patch.object(meta, "_read_shards", return_value=False) if whole else nullcontext():
        load_weights(model, Path(weights or path), cpu_offload=options["cpu_offload"])
    return model


def sharded_qwen3(seed: int = 0, *, replicate_size: int = 1, **options: Any) -> PreTrainedModel:
    """Return `tiny_qwen3`, sharded without a loader. `options` are those of SHARDING, and of its config."""
    chosen = {name: options.pop(name, default) for name, default in SHARDING.items()}
    model = tiny_qwen3(seed, **options).train()
    shard_model(model, build_mesh(replicate_size), compute_dtype=torch.float32, **chosen)
    return model


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor().detach().clone() if hasattr(tensor, "full_tensor") else tensor.detach().clone()


def full_state(model: nn.Module) -> dict[str, Tensor]:
    reshard(model)
    return {name: full(p) for name, p in model.named_parameters()}


def tokens(seed: int, rows: int = 8, length: int = 24) -> Tensor:
    """[rows, length] the same on every rank."""
    return torch.randint(5, 264, (rows, length), generator=torch.Generator().manual_seed(seed))


def backward(model: nn.Module, optimizer, seed: int, rows: int = 8) -> None:
    """One step's backward passes, two micro-batches, over this rank's share of the rows; the loss is a global mean."""
    ids = tokens(seed, rows)
    world, rank = dist.get_world_size(), dist.get_rank()
    for micro in ids[rank::world].chunk(2):
        logits = model(input_ids=micro, use_cache=False).logits[:, :-1].float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), micro[:, 1:].flatten(), reduction="sum")
        optimizer.scale(loss / ids[:, 1:].numel()).backward()


def train(model: nn.Module, optimizer, seeds) -> list[float]:
    """One optimizer step for each seed; the norms."""
    norms = []
    for seed in seeds:
        optimizer.zero_grad()
        backward(model, optimizer, seed)
        norms.append(optimizer.clip().item())
        optimizer.step()
    return norms
