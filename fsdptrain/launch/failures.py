"""Failures of ranks: error files, and selection of the root cause among several failures."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fsdptrain.errors import FsdptrainError, RankError
from fsdptrain.rank_variables import ERROR_FILE, has_fsdptrain_launcher

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_FIELDS = "fsdptrain"  # our part of an error file
_LONGEST = 4000  # characters of a message
_WAIT_FOR_FIRST_RANK_S = 2.0  # [s] for the first rank of a machine to speak: then torchrun ends the others


@dataclass(frozen=True)
class Failure:
    """Reason why a rank ended."""

    time: float  # [s] since the epoch
    text: str  # one line; for a bug, one line and a traceback; for a lost connection, with its last calls
    exit_code: int  # 2 for an FsdptrainError, 1 for a bug
    is_consequence: bool = False  # consequence of another rank's failure
    is_reported: bool = True  # by the rank itself


def failure_of(error: BaseException, rank: int, *, lost_connection: bool = False) -> Failure:
    """Build a Failure from `error`. `lost_connection`: the error is a lost connection to another rank."""
    if isinstance(error, FsdptrainError):
        text = "\nfsdptrain: ".join(map(_one_line, error.lines))
    elif lost_connection and type(error).__name__ != "DistBackendError":  # NCCL may name another cause
        text = (
            f"rank {rank} lost another rank, which has ended, hangs or is cut off (--dist-timeout): {_briefly(error)}"
        )
    else:
        text = f"rank {rank} failed\n{''.join(traceback.format_exception(error)).rstrip()}"
    return Failure(
        time=time.time(),
        text=text,
        exit_code=2 if isinstance(error, FsdptrainError) else 1,
        is_consequence=lost_connection or isinstance(error, RankError),
    )


def _briefly(error: BaseException) -> str:
    """Message, last calls and notes in one line."""
    calls = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
    message = f"{type(error).__name__}: {error}" + (f" (at {' > '.join(calls[-4:])})" if calls else "")
    return " ".join("; ".join([message, *getattr(error, "__notes__", [])]).split())


def _one_line(message: str) -> str:
    """Return a message that may quote names from files in one line of limited length."""
    line = " ".join(message.splitlines())
    return line if len(line) <= _LONGEST else line[:_LONGEST] + " ..."


def report_failure(failure: Failure) -> None:
    """Leave `failure` for the process that started this rank. Write it to stderr too, unless our launcher does."""
    path = os.environ.get(ERROR_FILE)
    is_left = _write_error_file(Path(path), failure) if path else False
    if is_left and has_fsdptrain_launcher():
        return
    if failure.is_consequence or (failure.exit_code == 2 and os.environ.get("LOCAL_RANK", "0") != "0"):
        time.sleep(_WAIT_FOR_FIRST_RANK_S)  # all ranks may have the same error: torchrun ends this one during the wait
    sys.stderr.write(f"fsdptrain: {failure.text}\n")


def _write_error_file(path: Path, failure: Failure) -> bool:
    """Write what torch's `ErrorHandler` writes, and our fields. False where that is impossible."""
    extra = {"py_callstack": failure.text, "timestamp": str(int(failure.time))}
    message = {"message": failure.text, "extraInfo": extra}
    half = path.with_suffix(".half")
    try:
        half.write_text(json.dumps({"message": message, _FIELDS: asdict(failure)}))
        half.rename(path)
    except OSError:  # a full disk
        return False
    return True


def root_cause(exits: Mapping[int, ProcessFailure]) -> Failure:
    """The failure that explains the others. exits: by rank, at least one."""
    return min((_ranked(rank, failed) for rank, failed in exits.items()), key=lambda one: one[:2])[2]


def _ranked(rank: int, failed: ProcessFailure) -> tuple[int, float, Failure]:
    """(order, time, failure). A rank that dies without an error file explains errors of those that miss it."""
    code = failed.exitcode
    if fields := failed.error_file_data.get(_FIELDS):
        failure = Failure(**fields)
        return (4 if failure.is_consequence else 2), failure.time, failure
    if code >= 0:
        text = f"rank {rank} exited with code {code} without an error message"
        return 1, rank, Failure(0.0, text, code, is_reported=False)
    name = signal.Signals(-code).name
    hint = "; the host may be out of memory: see dmesg, use fewer --nproc-per-node" if name == "SIGKILL" else ""
    order = {"SIGTERM": 5, "SIGABRT": 3}.get(name, 0)  # ended by the agent; by a C++ watchdog after losing another rank
    return order, rank, Failure(0.0, f"rank {rank} was killed by {name}{hint}", 2, is_reported=False)
