"""Report the first, best and last value of the main metrics of a run, from its folder."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fsdptrain.errors import ConfigError
from fsdptrain.tools.watch.run_data import Curve, RunData

Best = Callable[[Sequence[float]], float] | None  # of the values; None: they have no order


@dataclass(frozen=True)
class Row:
    """One metric: (step, value) of its first, best and last value."""

    label: str
    first: tuple[int, float]
    best: tuple[int, float] | None
    last: tuple[int, float]


def report_rows(curves: Mapping[str, Curve]) -> list[Row]:
    """Return the rows: reward, accuracy of each held-out set, length, selection; the loss if there is no reward."""
    metrics: dict[str, tuple[str, Best]] = {}
    if "reward/mean" not in curves:
        metrics = {"loss/total": ("loss", min), "eval/loss": ("loss of held-out rows", min)}
    metrics |= {"reward/mean": ("reward", max), "selection/reward_mean": ("reward, including dropped groups", max)}
    for name in curves:
        kind = name.rpartition("/")[2]
        if name.startswith("eval/") and kind in ("accuracy", "loss") and name != "eval/loss":
            label = {"heldout": "", "heldout_greedy": ", greedy"}.get(name.split("/")[1], f", {name.split('/')[1]}")
            metrics[name] = (f"{kind}{label}", max if kind == "accuracy" else min)
    metrics |= {"completion/length_mean": ("length [tokens]", None)}
    metrics |= {"selection/kept_fraction": ("share of groups kept", None)}
    rows = []
    for label, best, curve in ((*shown, curves[name]) for name, shown in metrics.items() if name in curves):
        points = [(int(step), value) for step, value in zip(*curve, strict=True)]
        values = [value for _, value in points]
        rows.append(Row(label, points[0], points[values.index(best(values))] if best else None, points[-1]))
    return rows


def print_report(run: RunData, folder: Path, name: str = "") -> None:
    """Print the rows as a table to stdout, with the `name` of the run. Raises ConfigError if it has no step yet."""
    rows = report_rows(run.curves)
    if not rows:
        raise ConfigError(f"{folder / 'metrics.jsonl'} has no step in it yet: pass the --output-dir of a run")
    table = Table("", box=None, pad_edge=False)
    for column in ("first", "best", "last"):
        table.add_column(column, justify="right")
        table.add_column("at step", justify="right", style="dim")
    for row in rows:
        table.add_row(Text(row.label), *(cell for point in (row.first, row.best, row.last) for cell in _cells(point)))
    console = Console()
    console.print(
        f"{name}: {run.title}" if name else run.title, soft_wrap=True, markup=False, highlight=False, style="bold"
    )
    console.print(table)


def _cells(point: tuple[int, float] | None) -> tuple[str, str]:
    if point is None:
        return "-", ""
    step, value = point
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}", str(step)
