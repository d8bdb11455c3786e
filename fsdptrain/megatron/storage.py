"""Checkpoints of a megatron-core model, with tensors named as in the Hugging Face files.

The files do not depend on the parallel sizes, so a run can resume with different ones. Adam's moments are converted by
the same table as the weights, which only rearranges values.

    <checkpoint>/weights/*.safetensors, exp_avg/, exp_avg_sq/    float32 masters and moments, bitwise exact
    <checkpoint>/trainer.json, rng-*.json                        as under FSDP

Rank 0 writes tensor by tensor while all ranks gather.
"""

import json
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import CheckpointError
from fsdptrain.fsdp.checkpoint import load_rng, read_state, write_state
from fsdptrain.fsdp.hub_files import write_stream
from fsdptrain.fsdp.optimizer import Optimizer
from fsdptrain.fsdp.optimizer_state import load_state_dict, state_dict, state_tensors
from fsdptrain.fsdp.reference_load import named_in_errors
from fsdptrain.megatron.masters import Masters
from fsdptrain.megatron.weights import WeightMap, open_files

WEIGHTS, MOMENTS = "weights", ("exp_avg", "exp_avg_sq")


def identity(stock: PreTrainedModel, weights: WeightMap) -> dict[str, Any]:
    """Return values that identify a model independently of its parallel sizes."""
    shapes = sorted((name, list(shape)) for name, shape in weights.shapes().items())
    return {
        "class": f"{type(stock).__name__} on megatron-core",
        "num_parameters": sum(p.numel() for p in stock.parameters()),
        "tensors": sha256(json.dumps(shapes).encode()).hexdigest()[:16],
    }


def save_checkpoint(
    directory: Path, weights: WeightMap, masters: Masters, optimizer: Optimizer, *, step: int, model: dict
) -> None:
    """Save to `directory`, which must exist. model: the result of `identity`. Collective."""
    state = state_tensors(optimizer)
    failure = f"checkpoint {directory} cannot be written"
    whole = weights.stream(dtype=torch.float32, of=masters.whole_master)
    write_stream(directory / WEIGHTS, whole, failure=failure)
    for moment in MOMENTS:
        parts = weights.stream(
            dtype=torch.float32,
            of=lambda name, kind=moment: masters.whole(name, state.get(f"{name}.{kind}")),
            only_parameters=True,
        )
        write_stream(directory / moment, parts, failure=failure)
    counts = {int(tensor) for name, tensor in state.items() if name.endswith(".step")}
    assert len(counts) == 1, "all parameters are updated together"
    write_state(directory, step=step, model=model, optimizer=state_dict(optimizer) | {"adam_steps": counts.pop()})


def load_checkpoint(directory: Path, weights: WeightMap, masters: Masters, optimizer: Optimizer, *, model: dict) -> int:
    """Load a checkpoint of `save_checkpoint` on any number of ranks and return its step. Collective."""
    state: dict[str, Any] = {}
    failure = f"checkpoint {directory} cannot be read"
    with raise_on_all_ranks(CheckpointError, failure):
        state = read_state(directory, model)
    with named_in_errors("checkpoint"), raise_on_all_ranks(CheckpointError, failure):
        tensors = state_tensors(optimizer)
        load_tensors(directory / WEIGHTS, weights, masters.take)
        for moment in MOMENTS if tensors else ():  # an export has an optimizer without state
            moments = {name.removesuffix(f".{moment}"): t for name, t in tensors.items() if name.endswith(f".{moment}")}
            load_tensors(directory / moment, weights, partial(masters.take, into=moments), only_parameters=True)
        for name, tensor in tensors.items():
            if name.endswith(".step"):
                tensor.fill_(state["optimizer"]["adam_steps"])
        load_state_dict(optimizer, state["optimizer"])
        load_rng(directory)
    masters.publish()
    return state["step"]


def load_tensors(
    folder: Path, weights: WeightMap, put: Callable[[str, Tensor], None] | None = None, *, only_parameters: bool = False
) -> None:
    """Load the files of `write_stream` into this rank's model. Arguments as in `WeightMap.load`."""
    with open_files(folder, weights.shapes(only_parameters=only_parameters), ignored=weights.ignored) as source:
        weights.load(source, put, only_parameters=only_parameters)
