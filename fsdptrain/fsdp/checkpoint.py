"""Write and read the state of a run, in a folder of `CheckpointFolder`: resumed bitwise, on any number of ranks.

No file is a pickle. The native file format of torch.distributed.checkpoint stores `.metadata` as a pickle and loads it
with `pickle.load` (torch 2.13, filesystem.py), which can run arbitrary code from an untrusted folder. Its safetensors
format, used here, has only JSON headers.
"""

import json
import random
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from fsdptrain import platform
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import CheckpointError
from fsdptrain.fsdp.checkpoint_folder import PendingWrite, broadcast, check_manifest
from fsdptrain.fsdp.optimizer import Optimizer
from fsdptrain.fsdp.shards import describe, fingerprint, model_tensors
from fsdptrain.fsdp.staging import Staging
from fsdptrain.model.structure import reshard

_STATE, _SHARDS, _REFERENCE, _RNG = "trainer.json", "shards", "reference", "rng-{rank:05d}.safetensors"
_FORMAT = 3
_FILE_BYTES = 1 << 28  # per rank; a file passes through host memory whole, twice


def save_checkpoint(
    directory: Path,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    step: int,
    adapter: str | None = None,
    staging: Staging | None = None,
) -> PendingWrite | None:
    """Write model, optimizer and random states into the existing `directory`. Collective.

    adapter: description of the adapter and its frozen weights, if only the adapter is trained and written. staging:
    copy the tensors, and return a function that writes the copies.
    """
    reshard(model)
    tensors = _tensors(model, optimizer, only_trained=adapter is not None)
    rest = _write_or_stage(directory / _SHARDS, tensors, staging)
    write_state(directory, step=step, model=_identity(model, adapter), optimizer=optimizer.state_dict())
    return rest


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
    """Load in place what `save_checkpoint` wrote and return its step. Collective.

    On the same number of ranks the run continues bitwise. On a larger number, a rank without saved random state keeps
    its current one. Raises CheckpointError on every rank; never restarts silently.
    """
    reshard(model)
    state: dict[str, Any] = {}
    with raise_on_all_ranks(CheckpointError, f"checkpoint {directory} cannot be read"):
        state = read_state(directory, _identity(model, adapter))
    optimizer.create_state(state["optimizer"])
    _read_shards(directory / _SHARDS, _tensors(model, optimizer, only_trained=adapter is not None))
    with raise_on_all_ranks(CheckpointError, f"checkpoint {directory} cannot be read"):
        optimizer.load_state_dict(state["optimizer"])
        load_rng(directory)
    return state["step"]


def save_reference(directory: Path, model: nn.Module, *, staging: Staging | None = None) -> PendingWrite | None:
    """Write `model`, currently the reference, next to the files of `save_checkpoint`. Collective."""
    reshard(model)
    return _write_or_stage(directory / _REFERENCE, _of_model(model), staging)


def has_reference(directory: Path) -> bool:
    """Return whether rank 0 sees a saved reference. Collective."""
    return bool(broadcast([int((directory / _REFERENCE).is_dir())])[0])


def load_reference(directory: Path, model: nn.Module) -> None:
    """Load into `model` what `save_reference` wrote. Collective."""
    reshard(model)
    _read_shards(directory / _REFERENCE, _of_model(model))


_REMEDY = "resume from another with --resume DIR, or start anew with --resume never"


def _error_of(caught: CheckpointException, what: str, remedy: str = "") -> BaseException:
    """Return the error to raise for one of DCP, which also catches Ctrl-C."""
    causes = [cause for cause, _ in caught.failures.values()]
    if interrupts := [cause for cause in causes if isinstance(cause, KeyboardInterrupt)]:
        return interrupts[0]
    reasons = "; ".join(sorted({f"{type(cause).__name__}: {cause}" for cause in causes}))
    return CheckpointError(f"{what} ({reasons}){remedy}")


def _identity(model: nn.Module, adapter: str | None) -> dict[str, Any]:
    return fingerprint(model) | ({} if adapter is None else {"adapter": adapter})


def _tensors(model: nn.Module, optimizer: Optimizer, *, only_trained: bool) -> dict[str, Tensor]:
    return _of_model(model, only_trained=only_trained) | {f"optimizer.{n}": t for n, t in optimizer.tensors().items()}


def _of_model(model: nn.Module, *, only_trained: bool = False) -> dict[str, Tensor]:
    chosen = {name: t for name, t in model_tensors(model).items() if t.requires_grad or not only_trained}
    return {f"model.{name}": torch.atleast_1d(t.detach()) for name, t in chosen.items()}  # views


def _write_or_stage(folder: Path, tensors: dict[str, Tensor], staging: Staging | None) -> PendingWrite | None:
    if staging is None:
        return _write_shards(folder, tensors)
    return partial(_write_shards, folder, staging.copy(folder.name, tensors), group=staging.group)


def _write_shards(folder: Path, tensors: dict[str, Tensor], *, group: dist.ProcessGroup | None = None) -> None:
    writer = dcp.HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=_file_plan(tensors), save_distributed=True)
    try:
        dcp.save(tensors, storage_writer=writer, process_group=group)
    except CheckpointException as error:
        raise _error_of(error, f"--output-dir: checkpoint {folder} cannot be written") from error


def _read_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    try:
        dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(folder)))
    except CheckpointException as error:
        raise _error_of(error, f"checkpoint {folder} cannot be read", f": {_REMEDY}") from error


def _file_plan(tensors: dict[str, Tensor]) -> dict[str, int]:
    """Map each tensor to its file number, from 1, with about `_FILE_BYTES` per file and rank."""
    plan: dict[str, int] = {}
    written = 0
    for name, tensor in tensors.items():
        plan[name] = 1 + written // _FILE_BYTES
        written += tensor.numel() * tensor.element_size() // dist.get_world_size()
    numbers = {number: i for i, number in enumerate(sorted(set(plan.values())), start=1)}
    return {name: numbers[number] for name, number in plan.items()}


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
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = cast(tuple, np.random.get_state(legacy=True))
    tensors = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "numpy": torch.from_numpy(keys.astype(np.int64)),
    }
    of_device = platform.device_rng_state()
    if of_device is not None:
        tensors["device"] = of_device
    scalars = {"python": [version, gauss], "numpy": [kind, position, has_gauss, cached]}
    save_file(tensors, path, metadata={"scalars": json.dumps(scalars)})


def load_rng(directory: Path) -> None:
    """Restore this rank's random states. Raises CheckpointError."""
    path = directory / _RNG.format(rank=dist.get_rank())
    if not path.exists():
        return  # more ranks than before; `read_state` detects missing files
    try:
        with safe_open(path, framework="pt") as file:
            scalars = json.loads(file.metadata()["scalars"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"checkpoint file {path} cannot be read ({error}): {_REMEDY}") from error
    version, gauss = scalars["python"]
    random.setstate((version, tuple(tensors["python"].tolist()), gauss))
    kind, position, has_gauss, cached = scalars["numpy"]
    np.random.set_state((kind, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(tensors["torch"])
    if "device" in tensors:
        platform.set_device_rng_state(tensors["device"])
