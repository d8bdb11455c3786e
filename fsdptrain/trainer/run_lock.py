"""The lock on the folder of a run: one run at a time, and one folder for all of its machines."""

import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TextIO

import torch.distributed as dist

from fsdptrain.config import Config
from fsdptrain.distributed import gather, raise_on_all_ranks
from fsdptrain.errors import ConfigError

log = logging.getLogger(__name__)

LOCK_FILE = ".lock"  # names the process that holds the lock
_SEEN_S = 60.0  # for a network file system to show what rank 0 wrote


@contextmanager
def lock_folder(config: Config) -> Iterator[None]:
    """Keep other runs out of --output-dir. Rank 0 holds the lock, and its end frees it, however it ends. Collective.

    Raises ConfigError on all ranks if another run holds it, or if machines have different folders of this name.
    """
    folder = Path(config.run.output_dir)
    path = folder / LOCK_FILE
    holder = gather(f"host {socket.gethostname()}, pid {os.getpid()}, since {datetime.now().astimezone()}")[0]
    file: TextIO | None = None
    with raise_on_all_ranks(ConfigError, f"--output-dir {folder} cannot be written: choose another"):
        if dist.get_rank() == 0:
            file = _lock(path, holder)
    try:
        if config.run.keep_last or config.run.record_rollouts:  # every rank writes its own part
            with raise_on_all_ranks(ConfigError, f"--output-dir {folder}"):
                _require_shared(path, holder, min(_SEEN_S, config.launch.dist_timeout / 2))
        yield
    finally:
        if file is not None:
            with suppress(OSError):
                file.truncate(0)
                if os.listdir(folder) == [path.name]:  # the run was rejected
                    path.unlink()
                    folder.rmdir()
            file.close()


def _lock(path: Path, holder: str) -> TextIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a+")
    try:
        if not _is_locked(file):
            raise ConfigError(
                f"--output-dir {path.parent} is in use by another run ({path.read_text() or 'it has just begun'}): "
                f"wait for it, or choose another folder; if that machine no longer exists, delete {path}"
            )
        file.truncate(0)
        file.write(holder)
        file.flush()
        os.fsync(file.fileno())  # a network file system may keep it until the file is closed
    except (OSError, ConfigError):
        file.close()
        raise
    os.register_at_fork(after_in_child=file.close)  # a forked worker that outlives rank 0 would hold the lock
    return file


def _is_locked(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        line = "--output-dir %s: its file system has no locks (%s), so two runs in it would not be noticed"
        log.warning(line, os.path.dirname(file.name), error.strerror)
    return True


def _require_shared(path: Path, holder: str, patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while not path.exists() or path.read_text() != holder:
        if time.monotonic() > deadline:
            raise ConfigError(
                f"--output-dir {path.parent} is another folder on another machine: choose one that all of them share"
            )
        time.sleep(0.1)
