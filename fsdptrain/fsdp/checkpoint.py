"""Write and read the state of a run, in a folder of `CheckpointFolder`: resumed bitwise, on any number of ranks."""

import json
import random
from collections.abc import Mapping
from concurrent.futures import Future
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import CheckpointError
from fsdptrain.fsdp.checkpoint_folder import check_manifest
from fsdptrain.fsdp.optimizer import Optimizer
from fsdptrain.fsdp.optimizer_state import create_state, load_state_dict, state_dict, state_tensors
from fsdptrain.fsdp.shard_files import HostStager, read_shards, write_shards
from fsdptrain.fsdp.shards import model_tensors
from fsdptrain.model.structure import reshard
from fsdptrain.random_state import device_rng_state, set_device_rng_state

_STATE, _SHARDS, _RNG = "trainer.json", "shards", "rng-{rank:05d}.json"
_FORMAT = 5
_REMEDY = "resume from another with --resume DIR, or start anew with --resume never"


def save_checkpoint(
    directory: Path,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    step: int,
    adapter: str | None = None,
    stager: HostStager | None = None,
) -> Future[Any] | None:
    """Write model, optimizer and random states into the existing `directory`. Collective.

    Args:
        adapter: description of the adapter and its frozen weights, if only the adapter is trained and written.
        stager: copies the tensors; the copies are then written in a thread, and this returns its future.
    """
    reshard(model)
    tensors = _tensors(model, optimizer, only_trained=adapter is not None)
    write_state(directory, step=step, model=_identity(model, adapter), optimizer=state_dict(optimizer))
    return write_shards(directory / _SHARDS, tensors, stager)


def write_state(directory: Path, *, step: int, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
    """Write all state that is not a tensor, and this rank's random states. model: its fingerprint. Collective."""
    state = {
        "format": _FORMAT,
        "step": step,
        "world_size": dist.get_world_size(),
        "model": model,
        "optimizer": optimizer,
    }
    with raise_on_all_ranks(CheckpointError, f"checkpoint {directory} cannot be written"):
        _save_rng(directory / _RNG.format(rank=dist.get_rank()))
        if dist.get_rank() == 0:
            (directory / _STATE).write_text(json.dumps(state, indent=2))


def load_checkpoint(directory: Path, model: nn.Module, optimizer: Optimizer, *, adapter: str | None = None) -> int:
    """Load in place what `save_checkpoint` wrote. Returns its step. Collective.

    On the same number of ranks the run continues bitwise. On a larger number, a rank without saved random state keeps
    its current one. Raises CheckpointError on every rank; never restarts silently.
    """
    reshard(model)
    state: dict[str, Any] = {}
    with raise_on_all_ranks(CheckpointError, f"checkpoint {directory} cannot be read"):
        state = read_state(directory, _identity(model, adapter))
    create_state(optimizer, state["optimizer"])
    tensors = _tensors(model, optimizer, only_trained=adapter is not None)
    read_shards(directory / _SHARDS, tensors, remedy=_REMEDY)
    with raise_on_all_ranks(CheckpointError, f"checkpoint {directory} cannot be read"):
        load_state_dict(optimizer, state["optimizer"])
        load_rng(directory)
    return state["step"]


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """Identify a model by its class and the names, shapes and dtypes of its tensors."""
    tensors = {name: [list(t.shape), str(t.dtype)] for name, t in model_tensors(model).items()}
    return {
        "class": type(model).__name__.removeprefix("FSDP"),  # fully_shard creates a class FSDP<Name>
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "tensors": sha256(json.dumps(tensors, sort_keys=True).encode()).hexdigest()[:16],
    }


def describe(model: Mapping[str, Any]) -> str:
    """Format a fingerprint for messages."""
    words = f"{model['class']}, {model['num_parameters']:,} parameters, tensors {model['tensors']}"
    return f"{words}, {model['adapter']}" if "adapter" in model else words


def _identity(model: nn.Module, adapter: str | None) -> dict[str, Any]:
    return fingerprint(model) | ({} if adapter is None else {"adapter": adapter})


def _tensors(model: nn.Module, optimizer: Optimizer, *, only_trained: bool) -> dict[str, Tensor]:
    chosen = {name: t for name, t in model_tensors(model).items() if t.requires_grad or not only_trained}
    weights = {f"model.{name}": torch.atleast_1d(t.detach()) for name, t in chosen.items()}  # views
    return weights | {f"optimizer.{name}": t for name, t in state_tensors(optimizer).items()}


def read_state(directory: Path, ours: dict[str, Any]) -> dict[str, Any]:
    """Read what `write_state` wrote. Raises CheckpointError unless the checkpoint is complete and matches `ours`."""
    if not directory.is_dir():
        raise CheckpointError(f"checkpoint {directory} is not there: {_REMEDY}")
    try:
        state = json.loads((directory / _STATE).read_text())
        if state.get("format") == _FORMAT:  # others have other manifests
            check_manifest(directory)
    except CheckpointError as error:
        raise CheckpointError(f"{error}: {_REMEDY}") from None
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {directory} is broken ({error}): {_REMEDY}") from error
    if state.get("format") != _FORMAT:
        raise CheckpointError(f"checkpoint {directory} has format {state.get('format')}, not {_FORMAT}: {_REMEDY}")
    if type(state.get("step")) is not int or not {"model", "optimizer"} <= state.keys():
        raise CheckpointError(f"checkpoint {directory} is broken ({_STATE} is not of a run): {_REMEDY}")
    theirs = state["model"]
    if ours != theirs:
        raise CheckpointError(
            f"checkpoint {directory} is of another model ({describe(theirs)}) than --hf-checkpoint "
            f"({describe(ours)}): {_REMEDY}"
        )
    return state


def _save_rng(path: Path) -> None:
    kind, keys, *rest = cast(tuple, np.random.get_state(legacy=True))
    states = {
        "python": random.getstate(),
        "numpy": [kind, keys.tolist(), *rest],
        "torch": torch.get_rng_state().tolist(),
    }
    of_device = device_rng_state()
    if of_device is not None:
        states["device"] = of_device.tolist()
    path.write_text(json.dumps(states))


def load_rng(directory: Path) -> None:
    """Restore this rank's random states. Raises CheckpointError."""
    path = directory / _RNG.format(rank=dist.get_rank())
    if not path.exists():
        return  # more ranks than before; `read_state` detects missing files
    try:
        states = json.loads(path.read_text())
        version, words, gauss = states["python"]
        random.setstate((version, tuple(words), gauss))
        np.random.set_state(tuple(states["numpy"]))
        torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))
        if "device" in states:
            set_device_rng_state(torch.tensor(states["device"], dtype=torch.uint8))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"checkpoint file {path} cannot be read ({error}): {_REMEDY}") from error
