"""Draw the stages of rank 0 from the timeline.jsonl of a run: one row per stage, one color per rollout."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdptrain.errors import ConfigError
from fsdptrain.tools.report.curves import BLUE, GRAY, GREEN, ORANGE, RED, new_figure, save, style
from fsdptrain.tools.report.report import is_number, read_rows, title

ROWS = ("generate", "reward", "logprobs", "train", "sync", "check", "eval", "save")  # top to bottom
COLORS = (BLUE, ORANGE, GREEN, RED, "#7a4fb3", "#c49a1a")  # of rollouts, cyclic
DEFAULT_ROLLOUTS = 4  # the last rollouts
_OPTIONS = (("rollout", "engine"), ("sync", "max_staleness"))  # that affect timelines


@dataclass(frozen=True)
class Bar:
    """One stage of one rollout. Overlapping bars of a row are placed in separate lanes."""

    stage: str
    rollout: int
    begin: float  # [s] since the first stage drawn
    end: float
    lane: int


def draw_timeline(run: Path, target: Path, rollouts: tuple[int, int] | None = None) -> Path:
    """Draw `rollouts` (first, last; default: the last four) to `target` (PNG or SVG)."""
    return save(make_figure(run, read_bars(run, rollouts)), target)


def read_bars(run: Path, rollouts: tuple[int, int] | None = None) -> list[Bar]:
    """Read the stages from timeline.jsonl that overlap the time range of `rollouts`."""
    path = run / "timeline.jsonl"
    spans = read_rows(path, "a rollout")
    for number, span in enumerate(spans, start=1):
        if not (
            isinstance(span.get("stage"), str)
            and all(is_number(span.get(name)) for name in ("rollout", "begin", "end"))
        ):
            raise ConfigError(f"{path}: line {number} is not a stage of a run; delete it")
    last = max((span["rollout"] for span in spans if span["stage"] == "train"), default=0)
    first, last = rollouts or (max(1, last - DEFAULT_ROLLOUTS + 1), last)
    chosen = [span for span in spans if first <= span["rollout"] <= last]
    if not chosen:
        known = f"{min(span['rollout'] for span in spans)}:{max(span['rollout'] for span in spans)}"
        raise ConfigError(f"--rollouts {first}:{last}: {run} holds {known}")
    start, end = min(span["begin"] for span in chosen), max(span["end"] for span in chosen)
    return in_lanes(
        [
            (s["stage"], s["rollout"], max(s["begin"], start) - start, min(s["end"], end) - start)
            for s in spans
            if s["begin"] < end and s["end"] > start
        ]
    )


def in_lanes(spans: Sequence[tuple[str, int, float, float]]) -> list[Bar]:
    """Place each (stage, rollout, begin, end) in the first free lane of its stage."""
    free: dict[str, list[float]] = {}  # stage -> end of the last bar of each lane
    bars = []
    for stage, rollout, begin, end in sorted(spans, key=lambda span: span[2]):
        ends = free.setdefault(stage, [])
        lane = next((i for i, busy_until in enumerate(ends) if busy_until <= begin), len(ends))
        ends[lane : lane + 1] = [end]
        bars.append(Bar(stage, rollout, begin, end, lane))
    return bars


def make_figure(run: Path, bars: Sequence[Bar]):
    """Return a matplotlib figure with one row of bars per stage."""
    rows = [stage for stage in ROWS if any(bar.stage == stage for bar in bars)]
    options = title(run, _OPTIONS, "--rollout-engine {} --max-staleness {}")
    figure = new_figure(options, width=10.0, height=0.42 * len(rows) + 1.1)
    axes = figure.add_subplot()
    lanes = {stage: 1 + max(bar.lane for bar in bars if bar.stage == stage) for stage in rows}
    for bar in bars:
        height = 0.8 / lanes[bar.stage]
        top = rows.index(bar.stage) - 0.4 + bar.lane * height
        color = COLORS[bar.rollout % len(COLORS)]
        axes.broken_barh([(bar.begin, bar.end - bar.begin)], (top, 0.9 * height), color=color, linewidth=0)
    for rollout in sorted({bar.rollout for bar in bars}):
        axes.broken_barh([], (0, 0), color=COLORS[rollout % len(COLORS)], label=f"rollout {rollout}")
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(left=0.0)
    style(axes, xlabel="seconds", grid="x")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, labelcolor=GRAY)
    return figure
