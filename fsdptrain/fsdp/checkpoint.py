"""Checkpoints of a run: written atomically, resumed bitwise, readable on any number of ranks.

    <output_dir>/checkpoints/step_00000050/
        shards/*.safetensors     model (or only its adapter) and optimizer, by torch.distributed.checkpoint
        reference/*.safetensors  the reference, if it has changed since the start of the run
        rng-00000.safetensors    random states of rank 0, and so on
        trainer.json             counters, schedule, loss scale, fingerprint of the model
        ...                      files added by the caller of `CheckpointFolder.write`
        manifest.json            every file above with its size; written last

No file is a pickle. The native file format of torch.distributed.checkpoint stores `.metadata` as a pickle and loads it
with `pickle.load` (torch 2.13, filesystem.py), which can run arbitrary code from an untrusted folder. Its safetensors
format, used here, has only JSON headers.
"""

import json
import logging
import os
import random
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from fsdptrain import platform
from fsdptrain.distributed import one_line, raise_on_all_ranks
from fsdptrain.errors import CheckpointError
from fsdptrain.fsdp.optimizer import Optimizer
from fsdptrain.fsdp.shards import describe, fingerprint, model_tensors
from fsdptrain.fsdp.staging import Background, Staging
from fsdptrain.model.structure import reshard

MANIFEST = "manifest.json"
_STATE, _SHARDS, _REFERENCE, _RNG = "trainer.json", "shards", "reference", "rng-{rank:05d}.safetensors"
_FORMAT = 1
_FILE_BYTES = 1 << 28  # per rank; a file passes through host memory whole, twice
_FOLDER = re.compile(r"step_(\d{8,})(?:\.(\d+))?")
logger = logging.getLogger(__name__)

# The rest of a checkpoint write, which a thread may run while training continues. All ranks run it together.
PendingWrite = Callable[[], None]


class CheckpointFolder:
    """The checkpoints of one run. A folder named `step_*` is always complete; incomplete ones have other names.

    As a context manager, it waits for background writes on exit.
    """

    def __init__(self, output_dir: Path, *, keep_last: int, timeout_s: float = 1800.0) -> None:
        """timeout_s: how long to wait for a checkpoint that is written in the background [s]."""
        self.directory = output_dir / "checkpoints"
        self._keep_last = keep_last
        self._timeout_s = timeout_s
        self._background: Background | None = None
        self._failure = ""  # message prefix if the last write fails

    def write(self, step: int, save: Callable[[Path], PendingWrite | None]) -> Path | None:
        """Write the checkpoint of `step`: call `save(folder)` on every rank, sync, rename, delete old ones. Collective.

        If `save` returns a pending write, that and the later steps run in the background; see `check` and `wait`.
        Checkpoints of later steps are deleted too: the run was resumed from before them, so they are stale.

        Returns the folder, or None if --keep-last is 0. Raises on all ranks if it failed on any; older checkpoints are
        then unchanged. `save` must not call collectives after code that can fail on one rank.
        """
        if self._keep_last == 0:
            return None
        self.wait()
        final = self._name(step)
        temporary = self.directory / f".tmp-{final.name}"
        self._failure = f"--output-dir: cannot write checkpoint {final}"
        with raise_on_all_ranks(CheckpointError, self._failure):
            if dist.get_rank() == 0:
                self._prepare(temporary)
        rest = None
        with raise_on_all_ranks(CheckpointError, self._failure):
            rest = save(temporary)
        if rest is not None:
            self._background = Background(partial(self._finish, rest, temporary, final))
            return final
        with raise_on_all_ranks(CheckpointError, self._failure):
            if dist.get_rank() == 0:
                self._publish(temporary, final)
        return final

    def check(self) -> None:
        """Raise on all ranks if a background write has failed on any rank. Collective."""
        if self._background is not None:
            with raise_on_all_ranks(CheckpointError, self._failure):
                self._background.check()

    def wait(self) -> None:
        """Wait for the background write. Raises on all ranks if it failed on any. Collective."""
        background, self._background = self._background, None
        if background is not None:
            with raise_on_all_ranks(CheckpointError, self._failure):
                background.wait(self._timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait for background writes. After an error, wait only for this rank and without collectives."""
        if error is None:
            self.wait()
        elif self._background is not None:
            try:
                self._background.wait(self._timeout_s)
            except Exception as failed:  # noqa: BLE001 - `error` is the reason for the end
                if one_line(failed) not in str(error):  # `check` may have raised the same error
                    logger.warning("%s: %s", self._failure, one_line(failed))

    def _finish(self, rest: PendingWrite, temporary: Path, final: Path) -> None:
        """Complete the write in a thread of each rank. On rank 0 `rest` returns when all ranks have written."""
        rest()
        if dist.get_rank() == 0:
            self._publish(temporary, final)

    def latest(self) -> Path | None:
        """Return the newest complete checkpoint, as seen by rank 0. Collective."""
        newest = self._existing()[-1:] if dist.get_rank() == 0 else []
        found = _broadcast([*newest[0][0], 1] if newest else [0, 0, 0])
        return self._folder(found[0], found[1]) if found[2] else None

    def _existing(self) -> list[tuple[tuple[int, int], Path]]:
        """Return ((step, attempt), folder) of all checkpoints, oldest first."""
        if not self.directory.is_dir():
            return []
        matches = [(match, path) for path in self.directory.iterdir() if (match := _FOLDER.fullmatch(path.name))]
        return sorted(((int(match[1]), int(match[2] or 0)), path) for match, path in matches)

    def _folder(self, step: int, attempt: int) -> Path:
        return self.directory / (f"step_{step:08d}" + (f".{attempt}" if attempt else ""))

    def _name(self, step: int) -> Path:
        """Return an unused name: a run that reaches `step` again must not replace a complete folder in place."""
        taken = [attempt for (other, attempt), _ in self._existing() if other == step] if dist.get_rank() == 0 else []
        return self._folder(step, _broadcast([max(taken, default=-1) + 1])[0])

    def _prepare(self, temporary: Path) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        for leftover in [*self.directory.glob(".tmp-*"), *self.directory.glob(".old-*")]:
            shutil.rmtree(leftover)
        temporary.mkdir()

    def _publish(self, temporary: Path, final: Path) -> None:
        _write_manifest(temporary)
        sync_tree(temporary)
        temporary.rename(final)
        _sync(self.directory)
        paths = [path for _, path in self._existing()]
        before, abandoned = paths[: paths.index(final)], paths[paths.index(final) + 1 :]
        gone = [*abandoned, *before[: len(before) + 1 - self._keep_last]]
        # Rename all before deleting any: a kill must leave no partial or abandoned folder under a valid name.
        doomed = [path.rename(path.with_name(f".old-{path.name}")) for path in gone]
        for path in doomed:
            shutil.rmtree(path)


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
    return bool(_broadcast([int((directory / _REFERENCE).is_dir())])[0])


def load_reference(directory: Path, model: nn.Module) -> None:
    """Load into `model` what `save_reference` wrote. Collective."""
    reshard(model)
    _read_shards(directory / _REFERENCE, _of_model(model))


_WAY_OUT = "resume from another with --resume DIR, or start anew with --resume never"


def _reasons(error: CheckpointException) -> str:
    return "; ".join(sorted({f"{type(e).__name__}: {e}" for e, _ in error.failures.values()}))


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
        raise CheckpointError(f"--output-dir: checkpoint {folder} cannot be written ({_reasons(error)})") from error


def _read_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    try:
        dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(folder)))
    except CheckpointException as error:
        raise CheckpointError(f"checkpoint {folder} cannot be read ({_reasons(error)}): {_WAY_OUT}") from error


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
        raise CheckpointError(f"checkpoint {directory} is not there: {_WAY_OUT}")
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        for name, size in manifest.items():
            found = (directory / name).stat().st_size
            if found != size:
                raise CheckpointError(
                    f"checkpoint {directory} is broken: {name} has {found} bytes, not {size}: {_WAY_OUT}"
                )
        state = json.loads((directory / _STATE).read_text())
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"checkpoint {directory} is broken ({error}): {_WAY_OUT}") from error
    if state.get("format") != _FORMAT:
        raise CheckpointError(f"checkpoint {directory} has format {state.get('format')}, not {_FORMAT}: {_WAY_OUT}")
    theirs = state["model"]
    if ours != theirs:
        raise CheckpointError(
            f"checkpoint {directory} is of another model ({describe(theirs)}) than --hf-checkpoint "
            f"({describe(ours)}): {_WAY_OUT}"
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
        raise CheckpointError(f"checkpoint file {path} cannot be read ({error}): {_WAY_OUT}") from error
    version, gauss = scalars["python"]
    random.setstate((version, tuple(tensors["python"].tolist()), gauss))
    kind, position, has_gauss, cached = scalars["numpy"]
    np.random.set_state((kind, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(tensors["torch"])
    if "device" in tensors:
        platform.set_device_rng_state(tensors["device"])


def _write_manifest(directory: Path) -> None:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    sizes = {str(path.relative_to(directory)): path.stat().st_size for path in files}
    (directory / MANIFEST).write_text(json.dumps(sizes, indent=2))


def sync_tree(directory: Path) -> None:
    """Make `directory` and everything in it durable (fsync)."""
    for path in sorted(directory.rglob("*"), reverse=True):
        _sync(path)
    _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _broadcast(values: list[int]) -> list[int]:
    """Broadcast small integers of rank 0 over gloo."""
    tensor = torch.tensor(values, dtype=torch.int64)
    dist.broadcast(tensor, src=0)
    return tensor.tolist()
