"""What the page shows of a run: curves of bounded length, the last samples, and how far it is."""

import json
import os
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from fsdptrain.config.recipe import read_mapping
from fsdptrain.errors import ConfigError

MOST_POINTS = 300  # of a curve
MOST_SAMPLES = 120
LONGEST_TEXT = 20_000  # [characters] of a prompt or response
_PACE_STEPS = 20  # steps whose mean duration gives the ETA
_SAMPLES_BYTES = 32 * 2**20  # read from the end of the file
_TITLE = (("algorithm", "algorithm"), ("model", "hf_checkpoint"), ("data", "prompt_data"))
Curve: TypeAlias = "tuple[array[float], array[float]]"  # steps, values


class RunData:
    """Follows the files of one run. Not safe for several threads."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._metrics = Tail(folder / "metrics.jsonl")
        self._samples = Tail(folder / "samples.jsonl", most_bytes=_SAMPLES_BYTES)
        self.curves: dict[str, Curve] = {}  # by metric
        self._shown: deque[dict[str, Any]] = deque(maxlen=MOST_SAMPLES)
        self._generation = self._version = self._num_samples = 0
        self._config: tuple[float, str, int | None] = (-1.0, folder.resolve().name, None)  # mtime, title, total

    @property
    def title(self) -> str:
        """`grpo of Qwen/Qwen3-4B on reasoning_gym:gsm_symbolic`, or the name of the folder."""
        return self._config[1]

    def poll(self) -> None:
        """Read what the run has written since the last call."""
        (curves_void, metrics), (samples_void, samples) = self._metrics.read(), self._samples.read()
        if curves_void:
            self.curves.clear()
        if samples_void:
            self._shown.clear()
            self._generation += 1
        for row in metrics:
            for name in (name for name, value in row.items() if name != "step" and is_number(value)):
                steps, values = self.curves.setdefault(name, (array("d"), array("d")))
                steps.append(row["step"])
                values.append(row[name])
        for sample in samples:
            self._num_samples += 1
            sample.pop("error", None)  # a page is shared
            shown = {name: value[:LONGEST_TEXT] if isinstance(value, str) else value for name, value in sample.items()}
            self._shown.append({"id": self._num_samples, **shown})
        is_new = self._read_config()
        if is_new or curves_void or samples_void or metrics or samples:
            self._version += 1

    def payload(self, seen: str = "") -> dict[str, Any]:
        """Return what has changed for a page that has the state `seen`, the `cursor` of an earlier payload."""
        cursor = f"{self._generation}.{self._version}.{self._num_samples}"
        if seen == cursor:
            return {"cursor": cursor}
        generation, _, rest = seen.partition(".")
        last = rest.rpartition(".")[2]
        has_samples = generation == str(self._generation) and last.isascii() and last.isdigit() and len(last) < 18
        first = int(last) if has_samples else 0
        _, heading, total = self._config
        return {
            "cursor": cursor,
            "name": self._name,
            "title": heading,
            "total": total,
            **self._progress(),
            "curves": {name: thinned(*curve) for name, curve in self.curves.items()},
            "samples": [sample for sample in self._shown if sample["id"] > first],
            "keeps_samples": has_samples,
        }

    def _progress(self) -> dict[str, float | None]:
        """Return the last step, when it was logged, and the mean seconds of the last steps."""
        steps, times = self.curves.get("time", (array("d"), array("d")))
        if not steps:
            return {"step": None, "updated": None, "pace": None}
        since_start = min(bisect_right(times, self._config[0]), len(times) - 1)  # the run writes config.yaml then
        first = max(since_start, bisect_right(steps, steps[-1] - _PACE_STEPS) - 1)
        done = steps[-1] - steps[first]
        return {
            "step": steps[-1],
            "updated": times[-1],
            "pace": (times[-1] - times[first]) / done if done > 0 else None,
        }

    def _read_config(self) -> bool:
        """Read config.yaml if it has changed. Returns whether it has."""
        path = self._folder / "config.yaml"
        try:
            changed = path.stat().st_mtime
            if changed == self._config[0]:
                return False
            config = read_mapping(path, what=str(path))
            title = "{} of {} on {}".format(*(_shown(str(config[section][key])) for section, key in _TITLE))
            self._config = (changed, title, int(config["run"]["num_rollout"]))
        except (FileNotFoundError, ConfigError, KeyError, TypeError, ValueError):  # not yet written, or of no run
            return False
        return True


def _shown(name: str) -> str:
    """Return the last part of a path, which is shared with the page, and a name on the Hub unchanged."""
    return name.rpartition("/")[2] if name.startswith(("/", ".", "~")) else name


def is_number(value: Any) -> bool:
    """Return whether a value of a record is a finite number."""
    return isinstance(value, int | float) and abs(value) < 1e300


def thinned(steps: Sequence[float], values: Sequence[float], most: int = MOST_POINTS) -> dict[str, list[float]]:
    """Return x and y of a curve; of a long one the mean, `low` and `high` of `most` groups of consecutive points."""
    if len(steps) <= most:
        return {"x": [_short(x) for x in steps], "y": [_short(y) for y in values]}
    ends = [(i + 1) * len(steps) // most for i in range(most)]
    groups = [values[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    return {
        "x": [_short(steps[end - 1]) for end in ends],
        "y": [_short(sum(group) / len(group)) for group in groups],
        "low": [_short(min(group)) for group in groups],
        "high": [_short(max(group)) for group in groups],
    }


def _short(value: float) -> float:
    """Keep six significant digits, or the millisecond of a time."""
    return int(value) if value.is_integer() else round(value, 3) if abs(value) > 1e6 else float(f"{value:.6g}")


class Tail:
    """Returns the rows that were added since the last call. A file that a resumed run has replaced is read anew."""

    def __init__(self, path: Path, *, most_bytes: int | None = None) -> None:
        """most_bytes: read at most so many from the end of a file that is there already. None: all."""
        self._path = path
        self._most_bytes = most_bytes
        self._file: tuple[int, int] | None = None  # device and inode
        self._offset = 0

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """Return (whether the rows of earlier calls are void, new rows). Skips lines that are not a record of a run."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                identity = (status.st_dev, status.st_ino)
                known = identity == self._file and status.st_size >= self._offset
                is_void = self._file is not None and not known
                if not known:
                    self._file = identity
                    self._offset = max(0, status.st_size - (self._most_bytes or status.st_size))
                is_inside_line = not known and self._offset > 0
                file.seek(self._offset)
                data = file.read(status.st_size - self._offset)
        except FileNotFoundError:
            return False, []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        lines = whole.split(b"\n")[1 if is_inside_line else 0 : -1]
        return is_void, [row for line in lines if (row := _parse(line)) is not None]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
        return row if isinstance(row["step"], int | float) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
