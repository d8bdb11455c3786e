"""metrics.jsonl and samples.jsonl: one JSON object per line, synced to disk when `log` returns."""

import json
import logging
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from fsdptrain.checkpoints import touch_private
from fsdptrain.errors import ConfigError

if TYPE_CHECKING:
    from fsdptrain.loggers import RunInfo

log = logging.getLogger(__name__)

_RERUN = "fix that and rerun the same command to resume from the newest checkpoint"


class JsonlLogger:
    """Appends to the JSONL files of a run. On resume, drops records of steps after the checkpoint.

    Records are dropped when the first new record is logged, so a run that fails earlier loses nothing.
    """

    def __init__(self, info: "RunInfo") -> None:
        self._resumed_step = info.resumed_step
        self._has_begun = False
        self._folder = info.output_dir
        with self._writing("choose another folder"):
            info.output_dir.mkdir(parents=True, exist_ok=True)
            self._metrics = _open(info.output_dir / "metrics.jsonl")
            self._samples = _open(info.output_dir / "samples.jsonl")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        with self._writing(_RERUN):
            self._begin()
            _write(self._metrics, [{"step": step, "time": round(time.time(), 3), **metrics}])

    def log_samples(self, samples: Sequence[Mapping[str, object]], step: int) -> None:
        with self._writing(_RERUN):
            self._begin()
            _write(self._samples, ({"step": step, **sample} for sample in samples))

    def close(self) -> None:
        with self._writing(_RERUN):  # closing flushes buffered data again
            self._metrics.close()
            self._samples.close()

    @contextmanager
    def _writing(self, remedy: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(f"--output-dir {self._folder} cannot be written: {error.strerror}; {remedy}") from error

    def _begin(self) -> None:
        if not self._has_begun:
            self._metrics = _reopen(self._metrics, self._resumed_step)
            self._samples = _reopen(self._samples, self._resumed_step)
            self._has_begun = True


def _open(path: Path) -> TextIO:
    if path.name == "samples.jsonl":
        touch_private(path)  # errors of episodes may hold secrets
    return path.open("a", encoding="utf-8", errors="replace", buffering=1)  # half a surrogate pair is no UTF-8


def _reopen(file: TextIO, resumed_step: int | None) -> TextIO:
    """Reopen the file with only the lines up to `resumed_step`.

    None: a new run. Files of an earlier run without a checkpoint are kept as `<name>.old`.
    """
    file.close()
    path = Path(file.name)
    if resumed_step is None:
        if path.stat().st_size > 0:
            path.replace(path.with_name(f"{path.name}.old"))
            log.warning("%s belongs to a run without a checkpoint: renamed to %s.old", path, path.name)
        return _open(path)
    from fsdptrain.loggers.rewind import rewind

    rewind(path, resumed_step)
    return _open(path)


def _write(file: TextIO, records: Iterable[Mapping[str, Any]]) -> None:
    file.write("".join(json.dumps(_finite(record), ensure_ascii=False, default=str) + "\n" for record in records))
    file.flush()
    os.fsync(file.fileno())


def _finite(value: Any) -> Any:
    """Replace infinite and NaN numbers by null, which JSON supports, and numbers of numpy and torch by Python's."""
    if getattr(value, "shape", None) == ():
        value = value.item()
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
