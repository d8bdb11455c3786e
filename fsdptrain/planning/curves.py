"""A picture of a run: reward, held-out accuracy and length over the rollouts, from its metrics.jsonl."""

import json
from collections.abc import Sequence
from pathlib import Path

from fsdptrain.errors import ConfigError

Series = tuple[list[float], list[float]]  # steps, values
INK, BLUE, ORANGE, GREEN = "#222222", "#2f6db5", "#d9772b", "#3a8f5c"


def read_series(run: Path, name: str) -> Series:
    """Steps and values of one metric, in order."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [float(step) for step, _ in found], [float(value) for _, value in found]


def draw_curves(run: Path, target: Path) -> Path:
    """Write the picture to `target` (PNG). Needs matplotlib, from the extra `plot`."""
    if not (run / "metrics.jsonl").is_file():
        raise ConfigError(f"{run} has no metrics.jsonl: name the --output-dir of a run")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("drawing needs matplotlib: pip install 'fsdptrain[plot]'") from error
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    reward, accuracy, length = figure.subplots(1, 3)
    _draw_noisy(reward, read_series(run, "reward/mean"), "Reward of the rollouts", BLUE)
    _draw_evaluations(accuracy, run)
    _draw_noisy(length, read_series(run, "completion/length_mean"), "Length of a completion [tokens]", GREEN)
    for axes in (reward, accuracy, length):
        _tidy(axes)
    figure.savefig(target, dpi=150)
    return target


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Mean over the last `window` values, over fewer at the start."""
    return [sum(values[max(0, i - window + 1) : i + 1]) / min(i + 1, window) for i in range(len(values))]


def _draw_noisy(axes, series: Series, title: str, colour: str) -> None:
    steps, values = series
    axes.plot(steps, values, color=colour, alpha=0.3, linewidth=1)
    axes.plot(steps, smooth(values, 5), color=colour, linewidth=2)
    axes.set_title(title, loc="left", fontsize=11, color=INK)


def _draw_evaluations(axes, run: Path) -> None:
    axes.set_title("Held-out accuracy", loc="left", fontsize=11, color=INK)
    for name, label, colour, above in (
        ("eval/heldout", "sampled", BLUE, -14),
        ("eval/heldout_greedy", "greedy", ORANGE, 6),
    ):
        steps, values = read_series(run, f"{name}/accuracy")
        if not steps:
            continue
        axes.plot(steps, values, color=colour, marker="o", markersize=4, linewidth=2, label=label)
        for index in (0, -1):
            text, at = f"{values[index]:.2f}", (steps[index], values[index])
            axes.annotate(text, at, (0, above), textcoords="offset points", ha="center", color=colour)
    axes.set_ylim(0, 1.08)
    axes.legend(frameon=False, loc="lower center")


def _tidy(axes) -> None:
    axes.set_xlabel("rollout", color=INK)
    axes.grid(axis="y", color="#e6e6e6")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
