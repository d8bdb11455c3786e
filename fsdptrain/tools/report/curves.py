"""Draw reward, held-out accuracy and length of a run over its steps, from its metrics.jsonl."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from fsdptrain.errors import ConfigError
from fsdptrain.tools.report.report import Series, evaluations, read_series, title

INK, GRAY, RULE = "#1f2933", "#6b7785", "#e4e8ec"
BLUE, ORANGE, GREEN, RED = "#2563b0", "#d9691e", "#2f8f5b", "#b83a4b"
WINDOW = 5  # steps averaged by the thick lines
NOISY: Mapping[str, tuple[str, str]] = {
    "reward/mean": ("Reward of the rollouts", BLUE),
    "loss/total": ("Loss", RED),
    "completion/length_mean": ("Length of a completion [tokens]", GREEN),
    "selection/kept_fraction": ("Share of groups kept", ORANGE),
}


def draw_curves(run: Path, target: Path) -> Path:
    """Draw the curves to `target` (PNG). Needs matplotlib, from the extra `plot`."""
    return save(make_figure(run), target)


def new_figure(heading: str, *, width: float, height: float):
    """Create a matplotlib figure without axes. Sizes in inches."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("drawing needs matplotlib: pip install 'fsdptrain[plot]'") from error
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(heading, x=0.008, ha="left", fontsize=10, fontweight="bold", color=INK)
    return figure


def save(figure, target: Path) -> Path:
    try:
        figure.savefig(target, dpi=150)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}") from error
    return target


def make_figure(run: Path):
    """Return a matplotlib figure with one panel per metric."""
    series = {name: read_series(run, name) for name in NOISY}
    if (all_groups := read_series(run, "selection/reward_mean"))[0]:
        series["reward/mean"] = all_groups  # the mean over kept groups stays near the middle, however good the policy
    if series["reward/mean"][0]:
        del series["loss/total"]  # a policy loss is not informative; a supervised one is
    evaluated = {name: read_series(run, f"eval/{name}/accuracy") for name in evaluations(run)}
    drawers = [partial(_draw_noisy, run=run, name=name, series=found) for name, found in series.items() if found[0]]
    if evaluated:
        drawers.insert(1, partial(_draw_evaluations, evaluated=evaluated))
    last_step = max([1.0, *(steps[-1] for steps, _ in [*series.values(), *evaluated.values()] if steps)])
    figure = new_figure(title(run), width=4.4 * len(drawers), height=4.0)
    for number, draw in enumerate(drawers, start=1):
        axes = figure.add_subplot(1, len(drawers), number)
        draw(axes)
        axes.set_xlim(-0.03 * last_step, 1.03 * last_step)  # the same in each panel, although rollouts start at 1
        axes.locator_params(axis="x", integer=True)
        style(axes, xlabel="step", grid="y")
    return figure


def style(axes, *, xlabel: str, grid: str) -> None:
    axes.set_xlabel(xlabel, color=GRAY)
    axes.grid(axis=grid, color=RULE)
    axes.set_axisbelow(True)
    axes.tick_params(colors=GRAY, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRAY)


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Return the mean over the last `window` values, or over fewer at the start."""
    return [sum(values[max(0, i - window + 1) : i + 1]) / min(i + 1, window) for i in range(len(values))]


def _draw_noisy(axes, run: Path, name: str, series: Series) -> None:
    steps, values = series
    heading, color = NOISY[name]
    means = smooth(values, WINDOW)
    if name == "completion/length_mean":
        _draw_range(axes, run, color)
    axes.plot(steps, values, color=color, alpha=0.45, linewidth=0.9, label="one step")
    axes.plot(steps, means, color=color, linewidth=2.4, label=f"mean of {WINDOW} steps")
    axes.plot(steps[-1:], means[-1:], color=color, marker="o", markersize=5)
    _head(axes, heading, [(f"{short(means[0])} → {short(means[-1])}", color)])
    if min(values) >= 0:
        axes.set_ylim(0, _top(values, axes))
    axes.legend(frameon=False, loc="best", fontsize=8, labelcolor=GRAY)


def _draw_range(axes, run: Path, color: str) -> None:
    steps, shortest = read_series(run, "completion/length_min")
    _, longest = read_series(run, "completion/length_max")
    if len(shortest) == len(longest):
        axes.fill_between(steps, shortest, longest, color=color, alpha=0.1, linewidth=0, label="shortest to longest")


def _draw_evaluations(axes, evaluated: Mapping[str, Series]) -> None:
    notes = []
    for (name, (steps, values)), color in zip(evaluated.items(), (BLUE, ORANGE, GREEN, RED), strict=False):
        label = "greedy" if name.endswith("_greedy") else "sampled" if name == "heldout" else name
        axes.plot(steps, values, color=color, marker="o", markersize=5, linewidth=2.4, label=label)
        notes.append((f"{label} {short(values[0])} → {short(values[-1])}", color))
    _head(axes, "Accuracy on held-out prompts", notes)
    axes.set_ylim(0, 1.05)
    if len(evaluated) > 1:
        axes.legend(frameon=False, loc="lower right", fontsize=8, labelcolor=GRAY)


def _head(axes, heading: str, notes: Sequence[tuple[str, str]]) -> None:
    """Set the title of a panel, with the first and last values below it in the colors of the lines."""
    axes.set_title(heading, loc="left", fontsize=11, color=INK, pad=24)
    at = 0.0
    for text, color in notes:
        axes.text(at, 1.03, text, transform=axes.transAxes, fontsize=10, fontweight="bold", color=color, va="bottom")
        at += 0.022 * len(text) + 0.06


def _top(values: Sequence[float], axes) -> float:
    """Return the upper limit of the y axis: about 1 for fractions, so that runs compare; else the highest line."""
    highest = max(values)
    return 1.05 if 0.2 < highest <= 1.0 else max(axes.get_ylim()[1], 1.05 * highest) or 1.0


def short(value: float) -> str:
    """Format with three significant digits: an accuracy of 0.996 is not shown as 1.00."""
    return f"{value:.3g}"
