"""The checkpoints of a run: complete folders only. Those that no option keeps are deleted.

<output_dir>/checkpoints/step_00000050/
    shards/*.safetensors     model (or only its adapter) and optimizer, by torch.distributed.checkpoint
    rng-00000.json           random states of rank 0, and so on
    trainer.json             counters, schedule, loss scale, fingerprint of the model
    ...                      files added by the caller of `CheckpointFolder.write`
    manifest.json            the size of every file above; written last
    hf/                      the exported model, with --export-every-save
"""

import json
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

from fsdptrain.checkpoints import EXPORT, list_checkpoints, set_aside, step_of
from fsdptrain.distributed import any_rank, one_line, raise_on_all_ranks
from fsdptrain.errors import CheckpointError

MANIFEST = "manifest.json"
logger = logging.getLogger(__name__)


class CheckpointFolder:
    """The checkpoints of one run. A folder named `step_*` is always complete; incomplete ones have other names.

    As a context manager, it waits for background writes on exit.
    """

    def __init__(
        self, output_dir: Path, *, keep_last: int, keep_every: int = 0, keep_best: int = 0, timeout_s: float = 1800.0
    ) -> None:
        """timeout_s: how long to wait for a checkpoint that is written in the background [s]."""
        self.directory = output_dir / "checkpoints"
        self._keep_last, self._keep_every, self._keep_best = keep_last, keep_every, keep_best
        self._timeout_s = timeout_s
        self._thread = ThreadPoolExecutor(1, "checkpoint")  # a finished write gets its name also during a long step
        self._pending: Future[None] | None = None
        self._failure = ""  # message prefix if the last write fails

    def write(self, step: int, save: Callable[[Path], Future[Any] | None], *, ranked: Sequence[int] = ()) -> Path:
        """Write the checkpoint of `step`: call `save(folder)` on every rank, sync, rename, delete old ones. Collective.

        If `save` returns a write in the background, the later steps follow in a thread: see `check`. Checkpoints of
        this and later steps are deleted too: the run was resumed from before them, so they are stale.

        ranked: steps of evaluations, best first.

        Returns the folder. Raises on all ranks if it failed on any; older checkpoints are then unchanged. `save` must
        not call collectives after code that can fail on one rank.
        """
        self.wait()
        final = self.directory / f"step_{step:08d}"
        temporary = self.directory / f".tmp-{final.name}"
        self._failure = f"--output-dir: cannot write checkpoint {final}"
        with raise_on_all_ranks(CheckpointError, self._failure):
            if dist.get_rank() == 0:
                self._prepare(temporary)
        pending = None
        with raise_on_all_ranks(CheckpointError, self._failure):
            pending = save(temporary)
        if pending is not None:
            self._pending = self._thread.submit(self._complete, pending, temporary, final, ranked)
            return final
        with raise_on_all_ranks(CheckpointError, self._failure):
            self._complete(None, temporary, final, ranked)
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

    def _complete(self, pending: Future[Any] | None, temporary: Path, final: Path, ranked: Sequence[int]) -> None:
        """Wait for the write of all ranks; publish on rank 0."""
        if pending is not None:
            from fsdptrain.fsdp.shard_files import finish_write

            finish_write(pending, final, self._timeout_s)
        if dist.get_rank() == 0:
            self._publish(temporary, final, ranked)

    def _prepare(self, temporary: Path) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        for leftover in self.directory.glob(".tmp-*"):
            shutil.rmtree(leftover)
        temporary.mkdir()

    def _publish(self, temporary: Path, final: Path, ranked: Sequence[int]) -> None:
        (temporary / MANIFEST).write_text(json.dumps(_sizes(temporary), indent=2, sort_keys=True))
        sync_tree(temporary)
        paths = list_checkpoints(self.directory.parent)
        before, stale = [x for x in paths if x.name < final.name], [x for x in paths if x.name >= final.name]
        # Rename all before deleting any: a kill must leave no partial or stale folder under a valid name.
        doomed = {*self.directory.glob(".old-*"), *map(set_aside, stale)}
        temporary.rename(final)
        _sync(self.directory)
        kept = self._kept([step_of(path) for path in (*before, final)], ranked)
        doomed |= {set_aside(path) for path in before if step_of(path) not in kept}
        for path in doomed:
            shutil.rmtree(path)

    def _kept(self, steps: Sequence[int], ranked: Sequence[int]) -> set[int]:
        """Return which of the existing `steps`, oldest first, stay. The newest one always does."""
        best = [step for step in ranked if step in steps][: self._keep_best]
        every = [step for step in steps if self._keep_every and step % self._keep_every == 0]
        return {*steps[-self._keep_last :], *best, *every}


def _sizes(directory: Path) -> dict[str, int]:
    """Return the size of each file below `directory` but manifest and export, by relative name. [bytes]"""
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != MANIFEST)
    sizes = {str(path.relative_to(directory)): path.stat().st_size for path in files}
    return {name: size for name, size in sizes.items() if not name.startswith(f"{EXPORT}/")}


def check_manifest(directory: Path) -> None:
    """Compare the files of a checkpoint with its manifest.

    Raises CheckpointError for a missing file or one of another size, OSError or ValueError for an unreadable manifest.
    """
    manifest, sizes = json.loads((directory / MANIFEST).read_text()), _sizes(directory)
    broken = sorted(name for name, size in manifest.items() if sizes.get(name) != size)
    if broken:
        raise CheckpointError(f"checkpoint {directory} is broken: {broken[0]} is missing or has another size")


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
