"""The checkpoints of a run: complete folders only, oldest deleted first.

<output_dir>/checkpoints/step_00000050/
    shards/*.safetensors     model (or only its adapter), optimizer, and the reference if it has changed since the start
                             of the run, by torch.distributed.checkpoint
    rng-00000.safetensors    random states of rank 0, and so on
    trainer.json             counters, schedule, loss scale, fingerprint of the model
    ...                      files added by the caller of `CheckpointFolder.write`
    manifest.json            every file above with its size and digest; written last
"""

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch
import torch.distributed as dist
import xxhash

from fsdptrain.checkpoints import list_checkpoints
from fsdptrain.distributed import any_rank, one_line, raise_on_all_ranks
from fsdptrain.errors import CheckpointError

if TYPE_CHECKING:
    from fsdptrain.fsdp.shard_files import FileDigest, ShardWrite

MANIFEST = "manifest.json"
_READERS, _BLOCK = 8, 1 << 24  # threads that read files, bytes per read
logger = logging.getLogger(__name__)


class CheckpointFolder:
    """The checkpoints of one run. A folder named `step_*` is always complete; incomplete ones have other names.

    As a context manager, it waits for background writes on exit.
    """

    def __init__(self, output_dir: Path, *, keep_last: int, timeout_s: float = 1800.0) -> None:
        """timeout_s: how long to wait for a checkpoint that is written in the background [s]."""
        self.directory = output_dir / "checkpoints"
        self._keep_last = keep_last
        self._timeout_s = timeout_s
        self._thread = ThreadPoolExecutor(1, "checkpoint")  # a finished write gets its name also during a long step
        self._pending: Future[None] | None = None
        self._failure = ""  # message prefix if the last write fails

    def write(self, step: int, save: "Callable[[Path], ShardWrite | None]") -> Path | None:
        """Write the checkpoint of `step`: call `save(folder)` on every rank, sync, rename, delete old ones. Collective.

        If `save` returns shards that are written in the background, the later steps follow in a thread: see `check`.
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
        shards = None
        with raise_on_all_ranks(CheckpointError, self._failure):
            shards = save(temporary)
        if shards is not None and shards.in_background:
            self._pending = self._thread.submit(self._complete, shards, temporary, final)
            return final
        with raise_on_all_ranks(CheckpointError, self._failure):
            self._complete(shards, temporary, final)
        return final

    def check(self) -> None:
        """Raise on all ranks if a background write has ended and failed on any rank. Collective."""
        if self._pending is not None and not any_rank(not self._pending.done()):
            self.wait()

    def wait(self) -> None:
        """Wait for the background write. Raises on all ranks if it failed on any. Collective."""
        pending, self._pending = self._pending, None
        if pending is not None:
            with raise_on_all_ranks(CheckpointError, self._failure):
                pending.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait for background writes. After an error, wait only for this rank and without collectives."""
        if error is None:
            self.wait()
        elif self._pending is not None:
            try:
                self._pending.result()
            except Exception as failed:  # noqa: BLE001 - `error` is the reason for the end
                logger.warning("%s: %s", self._failure, one_line(failed))

    def _complete(self, shards: "ShardWrite | None", temporary: Path, final: Path) -> None:
        """Wait for the shards of all ranks; publish on rank 0, which has the digests of all."""
        written = {} if shards is None else shards.digests(self._timeout_s)
        if dist.get_rank() == 0:
            others = [name for name in _file_names(temporary) if name not in written]
            self._publish(temporary, final, {**written, **digests(temporary, others)})

    def latest(self) -> Path | None:
        """Return the newest complete checkpoint, as seen by rank 0. Collective."""
        newest = self._existing()[-1:] if dist.get_rank() == 0 else []
        found = broadcast([*newest[0][0], 1] if newest else [0, 0, 0])
        return self._folder(found[0], found[1]) if found[2] else None

    def _existing(self) -> list[tuple[tuple[int, int], Path]]:
        """Return ((step, attempt), folder) of all checkpoints, oldest first."""
        return list_checkpoints(self.directory.parent)

    def _folder(self, step: int, attempt: int) -> Path:
        return self.directory / (f"step_{step:08d}" + (f".{attempt}" if attempt else ""))

    def _name(self, step: int) -> Path:
        """Return an unused name: a run that reaches `step` again must not replace a complete folder in place."""
        taken = [attempt for (other, attempt), _ in self._existing() if other == step] if dist.get_rank() == 0 else []
        return self._folder(step, broadcast([max(taken, default=-1) + 1])[0])

    def _prepare(self, temporary: Path) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        for leftover in [*self.directory.glob(".tmp-*"), *self.directory.glob(".old-*")]:
            shutil.rmtree(leftover)
        temporary.mkdir()

    def _publish(self, temporary: Path, final: Path, manifest: "Mapping[str, FileDigest]") -> None:
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2, sort_keys=True))
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


def digests(directory: Path, names: Sequence[str]) -> "dict[str, FileDigest]":
    """Return size and digest of the files `names` below `directory`."""
    with ThreadPoolExecutor(_READERS) as threads:
        return dict(zip(names, threads.map(_digest, [directory / name for name in names]), strict=True))


def _file_names(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def check_manifest(directory: Path) -> None:
    """Compare the files of a checkpoint with its manifest: all names and this rank's share of sizes and digests.

    Raises CheckpointError for a missing or changed file, and for one that a manifest should name. OSError or ValueError
    for an unreadable manifest.
    """
    manifest = json.loads((directory / MANIFEST).read_text())
    here, folders = _file_names(directory), {name.partition("/")[0] for name in manifest}
    unknown = [name for name in here if name not in manifest and name != MANIFEST and _is_ours(Path(name), folders)]
    broken = [f"{name} is not in its manifest" for name in unknown]
    broken += [f"{name} is missing" for name in manifest.keys() - {*here}]
    if not broken:
        found = digests(directory, sorted(manifest)[dist.get_rank() :: dist.get_world_size()])
        broken = [f"{name} has changed" for name in found if found[name] != tuple(manifest[name])]
    if broken:
        raise CheckpointError(f"checkpoint {directory} is broken: {' '.join(min(broken).split())}")


def _is_ours(name: Path, folders: Set[str]) -> bool:
    """Return whether a checkpoint may have written this file; a user may add others, such as an export."""
    return name.parts[0] in folders if len(name.parts) > 1 else name.suffix in (".json", ".safetensors")


def _digest(path: Path) -> "FileDigest":
    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            state.update(block)
    return path.stat().st_size, state.hexdigest()


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


def broadcast(values: list[int]) -> list[int]:
    """Broadcast small integers of rank 0 over gloo."""
    tensor = torch.tensor(values, dtype=torch.int64)
    dist.broadcast(tensor, src=0)
    return tensor.tolist()
