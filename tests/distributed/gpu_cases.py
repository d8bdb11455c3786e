"""Optimizer steps on whatever device there is; as a program, on the CPU: `-m tests.distributed.gpu_cases IN OUT`."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdptrain.algo.losses import LOSSES
from fsdptrain.fsdp.backend import FSDPBackend
from fsdptrain.platform import device_type, process_group
from fsdptrain.types import LossConfig

from .sharded import full_state
from .test_fsdp_backend import config, packs_of_this_rank, samples

NUM_STEPS = 3
WORD_LAYERS = {"num_hidden_layers": 4, "head_dim": 32}  # the device's attention takes heads of 32


def make(checkpoint: str, values: dict[str, Any]) -> FSDPBackend:
    # with a large epsilon Adam does not blow the rounding of tiny gradients up to whole steps
    return FSDPBackend(config(checkpoint, adam_eps=0.01, **values), total_steps=10)


def steps(backend: FSDPBackend) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """The metrics of some steps of several packs, and the weights after the last, on the CPU."""
    history = []
    for seed in range(NUM_STEPS):
        packs = packs_of_this_rank(samples(seed=seed), 128)
        history.append(backend.train_step(packs, LOSSES["grpo"], LossConfig()))
    return history, {name: tensor.cpu() for name, tensor in full_state(backend.model).items()}


def train(checkpoint: str, values: dict[str, Any]) -> dict[str, Any]:
    backend = make(checkpoint, values)
    history, weights = steps(backend)
    return {
        "history": history,
        "weights": weights,
        "device": backend.device.type,
        "fused": all(group["fused"] for group in backend._optimizer.inner.param_groups),
        "backends": dist.get_backend_config(),
    }


if __name__ == "__main__":
    with process_group(60):
        assert device_type() == "cpu", "CUDA_VISIBLE_DEVICES must be empty"
        torch.save(train(sys.argv[1], {}), Path(sys.argv[2]))
