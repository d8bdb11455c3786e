"""The result of a run."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdptrain.types import Metrics

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class RunResult(Mapping[str, float]):
    """What `Trainer.fit` returns. As a mapping, the last value of every metric."""

    step: int
    """Rollouts trained on."""
    folder: Path
    """The folder of the run."""
    model: Path | None
    """Folder of the exported model, for from_pretrained; None if the run did not export one."""
    stopped: str
    """Why the run ended early: `Ctrl-C`, `SIGTERM`, the reason of a callback, or an option such as `--stop-when`. Empty
    for a whole run."""
    metrics: Metrics = field(repr=False)
    """The last value of every metric."""
    stop_signal: int | None = field(default=None, repr=False)
    """Number of the signal that ended the run early."""
    best: tuple[int, float] | None = None
    """Step and value of the best evaluation by `--eval-metric`; step 0 is before training. None without evaluations."""

    @property
    def evaluation(self) -> Metrics:
        """The metrics of the last evaluation; empty if there was none."""
        return {name: value for name, value in self.metrics.items() if name.startswith("eval/")}

    @cached_property
    def history(self) -> "pandas.DataFrame":
        """All logged metrics: a row per step, a column per metric; also of the steps before a resume.

        Read from metrics.jsonl, which rank 0 writes: other machines may not see it.
        """
        import pandas  # comes with datasets; takes 0.5 s

        rows: dict[int, dict[str, Any]] = {}
        for line in (self.folder / "metrics.jsonl").read_text().splitlines():
            row = json.loads(line)
            rows.setdefault(row["step"], {}).update(row)
        return pandas.DataFrame(list(rows.values())).set_index("step") if rows else pandas.DataFrame()

    def __getitem__(self, name: str) -> float:
        return self.metrics[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.metrics)

    def __len__(self) -> int:
        return len(self.metrics)
