"""The lock on the folder of a run: one run at a time, and one folder for all of its machines."""

import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TextIO

import torch.distributed as dist

from fsdptrain.config import Config
from fsdptrain.distributed import any_rank, gather, raise_on_all_ranks
from fsdptrain.errors import ConfigError
from fsdptrain.rank_variables import restart_count

log = logging.getLogger(__name__)

LOCK_FILE = ".lock"  # names the process that holds the lock
_SEEN = 60.0  # [s] for a network file system to show what rank 0 wrote
_FREED = 120.0  # [s] for it to free the lock of a machine that died; a lease of NFS is 90 s


@contextmanager
def lock_folder(config: Config) -> Iterator[None]:
    """Keep other runs out of --output-dir. Rank 0 holds the lock, and its end frees it, however it ends. Collective.

    Raises ConfigError on all ranks if another run holds it, or if machines have different folders of this name.
    """
    folder, patience_s = Path(config.run.output_dir), min(_SEEN, config.launch.dist_timeout / 2)
    restarted = any_rank(restart_count() > 0)
    holder = f"host {socket.gethostname()}, pid {os.getpid()}, since {datetime.now().astimezone()}"
    with ExitStack() as stack:
        with raise_on_all_ranks(ConfigError, f"--output-dir {folder} cannot be written: choose another"):
            if dist.get_rank() == 0:
                stack.enter_context(_held(folder / LOCK_FILE, holder, _FREED if restarted else 0.0))
        holder = gather(holder)[0]  # with its time, no older run wrote the same
        if config.run.keep_last:  # every rank writes its own part
            with raise_on_all_ranks(ConfigError, f"--output-dir {folder}"):
                _require_shared(folder / LOCK_FILE, holder, patience_s)
        yield


@contextmanager
def _held(path: Path, holder: str, patience_s: float) -> Iterator[None]:
    with _open_locked(path, time.monotonic() + patience_s) as file:
        file.truncate(0)
        file.write(holder)
        file.flush()
        os.fsync(file.fileno())  # a network file system may keep it until the file is closed
        os.register_at_fork(after_in_child=file.close)  # a forked worker that outlives rank 0 would hold the lock
        try:
            yield
        finally:
            with suppress(OSError):
                file.truncate(0)
                if os.listdir(path.parent) == [path.name]:  # the run was rejected
                    path.unlink()
                    path.parent.rmdir()


def _open_locked(path: Path, deadline: float) -> TextIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        if time.monotonic() < deadline:
            time.sleep(0.5)
            return _open_locked(path, deadline)
        holder = path.read_text() or "it has just begun"
        raise ConfigError(
            f"--output-dir {path.parent} is in use by another run ({holder}): wait for it, or choose another folder; "
            f"if that machine is gone, delete {path}"
        ) from None
    except OSError as error:
        line = "--output-dir %s: its file system has no locks (%s), so two runs in it would not be noticed"
        log.warning(line, path.parent, error.strerror)
    return file


def _require_shared(path: Path, holder: str, patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while not path.exists() or path.read_text() != holder:
        if time.monotonic() > deadline:
            raise ConfigError(
                f"--output-dir {path.parent} is another folder on another machine: choose one that all of them share"
            )
        time.sleep(0.1)
