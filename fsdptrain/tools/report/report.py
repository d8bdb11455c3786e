"""Report the first, best and last value of the main metrics of a run, from its folder."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fsdptrain.config.recipe import read_mapping
from fsdptrain.errors import ConfigError

Series = tuple[list[float], list[float]]  # steps, values
_TITLE = (("algorithm", "algorithm"), ("model", "hf_checkpoint"), ("data", "prompt_data"))


@dataclass(frozen=True)
class Row:
    """One metric: (step, value) of its first, best and last value. `best` is None if values have no order."""

    label: str
    first: tuple[int, float]
    best: tuple[int, float] | None
    last: tuple[int, float]


def report_rows(run: Path) -> list[Row]:
    """Collect the rows: reward, accuracy of each held-out set, length, selection; the loss if there is no reward."""
    rows = [_row("reward", read_series(run, "reward/mean"), max)]
    rows.append(_row("reward, including dropped groups", read_series(run, "selection/reward_mean"), max))
    for name in evaluations(run):
        label = "accuracy" + {"heldout": "", "heldout_greedy": ", greedy"}.get(name, f", {name}")
        rows.append(_row(label, read_series(run, f"eval/{name}/accuracy"), max))
    rows.append(_row("length [tokens]", read_series(run, "completion/length_mean"), None))
    rows.append(_row("share of groups kept", read_series(run, "selection/kept_fraction"), None))
    if rows[0] is None:  # a policy loss is not informative; a supervised one is
        rows.insert(0, _row("loss", read_series(run, "loss/total"), min))
    if not any(rows):
        raise ConfigError(f"{run / 'metrics.jsonl'} has no step with these metrics yet")
    return [row for row in rows if row is not None]


def print_report(run: Path) -> None:
    """Print the rows as a table to stdout."""
    rows = report_rows(run)
    table = Table("", box=None, pad_edge=False)
    for column in ("first", "best", "last"):
        table.add_column(column, justify="right")
        table.add_column("at step", justify="right", style="dim")
    for row in rows:
        table.add_row(Text(row.label), *(cell for point in (row.first, row.best, row.last) for cell in _cells(point)))
    console = Console()
    console.print(title(run), soft_wrap=True, markup=False, highlight=False, style="bold")
    console.print(table)


def _cells(point: tuple[int, float] | None) -> tuple[str, str]:
    if point is None:
        return "-", ""
    step, value = point
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}", str(step)


def read_series(run: Path, name: str) -> Series:
    """Return the steps and values of one metric, in order."""
    found = [(row["step"], row[name]) for row in read_metrics(run) if row.get(name) is not None]
    for step, value in found:
        if not is_number(value):
            raise ConfigError(f"{run / 'metrics.jsonl'}: {name} of step {step} is {str(value)[:80]!r}, not a number")
    return [float(step) for step, _ in found], [float(value) for _, value in found]


def evaluations(run: Path) -> list[str]:
    """Return the names of the evaluated sets, in logging order."""
    names = dict.fromkeys(name for row in read_metrics(run) for name in row)
    return [name.split("/")[1] for name in names if name.startswith("eval/") and name.endswith("/accuracy")]


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Read the lines of metrics.jsonl."""
    return read_rows(run / "metrics.jsonl", "a step")


def read_rows(path: Path, content: str) -> list[dict[str, Any]]:
    """Read a JSON lines file of a run. Skips an incomplete last line. Raises ConfigError for no or broken lines."""
    lines = path.read_text(errors="replace").split("\n")[:-1] if path.is_file() else []
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
            is_record = is_number(rows[-1]["step"])
        except (ValueError, KeyError, TypeError, RecursionError):
            is_record = False
        if not is_record:
            raise ConfigError(f"{path}: line {number} is not a record of a run; delete it")
    if not rows:
        raise ConfigError(f"{path.parent} has no {path.name} with {content} in it: pass the --output-dir of a run")
    return rows


def title(run: Path, names: Sequence[tuple[str, str]] = _TITLE, text: str = "{} of {} on {}") -> str:
    """Return `grpo of Qwen/Qwen3-4B on reasoning_gym:gsm_symbolic`, or the folder name if config.yaml lacks a value."""
    path = run / "config.yaml"
    config = read_mapping(path, what=str(path)) if path.is_file() else {}
    if not all(isinstance(config.get(section) or {}, Mapping) for section, _ in names):
        raise ConfigError(f"{path} is not the configuration of a run: its sections hold keys with values")
    values = [(config.get(section) or {}).get(key) for section, key in names]
    values = [" ".join(map(str, value)) if isinstance(value, list) else value for value in values]
    return run.resolve().name if None in values else text.format(*values)


def is_number(value: Any) -> bool:
    """Return whether a value of a record is a finite number."""
    return isinstance(value, int | float) and abs(value) < 1e300


def _row(label: str, series: Series, better: Callable[[Sequence[float]], float] | None) -> Row | None:
    steps, values = series
    if not values:
        return None
    points = [(int(step), value) for step, value in zip(steps, values, strict=True)]
    best = points[values.index(better(values))] if better is not None else None
    return Row(label, points[0], best, points[-1])
