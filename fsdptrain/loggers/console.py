"""Console output: a live progress bar in a terminal, one line per step elsewhere, samples, and a final table."""

import math
import time
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column, Table
from rich.text import Text

from fsdptrain import __version__
from fsdptrain.config import Config
from fsdptrain.loggers.run_info import RunInfo

_SHOWN = {  # label -> metric; `*` matches the first evaluation set
    "reward": "reward/mean",
    "std": "reward/std",
    "acc": "eval/*/accuracy",
    "loss": "loss/total",
    "teacher kl": "distill/reverse_kl",
    "len": "completion/length_mean",
    "cut": "completion/truncated_fraction",
    "grad": "optim/grad_norm",
    "tok/s": "perf/tokens_per_s",
}
_SHOWN_SAMPLES = 2  # of an evaluation
_LONGEST_TEXT = 200  # [characters]
_SECONDS_PER_LINE = 1.0
_ONLY_WITHOUT_REWARD = "loss"  # a supervised loss is informative, a policy loss is not


class ConsoleLogger:
    """Shows progress in a live line (in a terminal) or in one line per step."""

    def __init__(
        self, info: RunInfo, *, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console if console is not None else Console()
        self._info = info
        self._clock = clock
        self._started = clock()
        self._last_line = -math.inf
        self._first_step = info.resumed_step or 0
        self._last_step = self._first_step
        self._pace_from: tuple[int, float] | None = None  # first step of this process and when it ended
        self._history: dict[str, list[float]] = {}  # label -> values, in order of arrival
        self._print(header(info))
        self._bar = _bar(self._console, info.total_steps) if self._console.is_terminal and info.total_steps else None
        if self._bar is not None:
            self._task = self._bar.add_task("", total=info.total_steps, completed=self._first_step, line="")
            self._bar.start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._last_step = step
        shown = _pick(metrics)
        for label, value in shown.items():
            self._history.setdefault(label, []).append(value)
        if self._bar is not None:
            latest = {label: values[-1] for label, values in self._history.items()}
            self._bar.update(self._task, completed=step, line=f"{self._eta(step)}  {metrics_line(latest)}".strip())
        elif shown and self._due(step, metrics):
            total = self._info.total_steps
            count = f"step {step:>{len(str(total))}}/{total}  " if total else ""  # else only an evaluation
            self._print(f"{count}{metrics_line(shown)}  {self._eta(step)}".rstrip())

    def log_samples(self, samples: Sequence[Mapping[str, object]], step: int) -> None:
        """Print the first samples of an evaluation. samples.jsonl contains all of them."""
        for sample in [sample for sample in samples if sample.get("set") != "train"][:_SHOWN_SAMPLES]:
            width = self._console.width if self._console.is_terminal else _LONGEST_TEXT
            self._console.print(sample_lines(sample, step, width=width), soft_wrap=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        if any(self._history.values()) and self._info.total_steps:
            self._console.print(summary(self._history))
        end = f"{duration(self._clock() - self._started)}, written to {self._info.output_dir}"
        if self._last_step >= self._info.total_steps:
            self._print(f"done in {end}")
            return
        saved = max((path.name for path in (self._info.output_dir / "checkpoints").glob("step_*")), default=None)
        resume_hint = "there is no checkpoint yet (--save-interval)"
        if saved is not None:
            resume_hint = f"rerun the same command to resume after step {int(saved[5:13])}"
        self._print(f"stopped after step {self._last_step} of {self._info.total_steps}, {end}; {resume_hint}")

    def _due(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Return whether to print a line: of each step, but of short ones once a second; and of each evaluation."""
        now = self._clock()
        is_edge = step in (self._first_step + 1, self._info.total_steps)
        if (
            now - self._last_line < _SECONDS_PER_LINE
            and not is_edge
            and not any(m.startswith("eval/") for m in metrics)
        ):
            return False
        self._last_line = now
        return True

    def _eta(self, step: int) -> str:
        """Estimate the remaining time from the average pace since the first step, which has the start of the run."""
        now, left = self._clock(), self._info.total_steps - step
        if step > self._first_step and self._pace_from is None:
            self._pace_from = (step, now)
        if self._pace_from is None or step == self._pace_from[0] or left <= 0:
            return ""
        since, begin = self._pace_from
        return f"ETA {duration((now - begin) / (step - since) * left)}"

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)


def header(info: RunInfo) -> str:
    """Describe the run in two or three short lines."""
    lines = [f"fsdptrain {__version__}  {info.run_name}"]
    if info.config is not None:
        lines += _facts(info.config)
    if info.resumed_step is not None and 0 < info.total_steps <= info.resumed_step:
        lines.append(
            f"  this run is complete, step {info.resumed_step} of {info.total_steps}; raise --num-rollout to continue"
        )
    elif info.resumed_step is not None and info.total_steps:
        lines.append(f"  resumes after step {info.resumed_step} of {info.total_steps}")
    return "\n".join(lines)


def _facts(config: Config) -> list[str]:
    algorithm = config.algorithm.algorithm
    size = (
        f"{config.samples_per_rollout} samples a step"
        if algorithm == "sft"
        else f"{config.rollout.batch_size} prompts x {config.algorithm.n_samples_per_prompt} samples a rollout, "
        f"{config.steps_per_rollout} optimizer step{'s' if config.steps_per_rollout > 1 else ''} on each"
    )
    subject = f"{config.model.hf_checkpoint} ({config.compute_dtype_name}) on {config.data.data_name}"
    if not config.run.num_rollout:
        return [f"  evaluation of {subject}"]
    return [
        f"  {algorithm} of {subject}",
        f"  {config.run.num_rollout} x {size}, lr {config.optim.lr:g} {config.optim.lr_decay_style}",
    ]


def metrics_line(shown: Mapping[str, float]) -> str:
    """Format metrics: `reward 0.531  len 128  grad 0.310  tok/s 1.2k`."""
    return "  ".join(f"{label} {number(shown[label])}" for label in _SHOWN if label in shown)


def sample_lines(sample: Mapping[str, object], step: int, *, width: int) -> Text:
    """Format a sample in three short lines: step and reward, the end of the prompt, the response."""
    reward = sample.get("reward")
    rewarded = f"reward {number(reward)}" if isinstance(reward, int | float) else "no reward"
    room = max(20, min(_LONGEST_TEXT, width) - len("  response  "))
    text = Text(f"sample of step {step}  {rewarded}\n", style="bold")
    for name, value, keeps in (("prompt", sample.get("prompt"), 0.25), ("response", sample.get("response"), 0.5)):
        text.append(f"  {name:<8}  ", style="dim")
        text.append(f"{shortened(printable(str(value)), room, keeps)}\n", style="not bold")
    text.rstrip()
    text.no_wrap, text.overflow = True, "ignore"
    return text


def printable(text: str) -> str:
    """Put `text` on one line: spaces for line breaks, and no control characters, which could act on the terminal."""
    return " ".join("".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in text).split())


def shortened(text: str, room: int, keeps: float) -> str:
    """Cut `text` to `room` characters: `keeps` of them from its start, the rest from its end."""
    if len(text) <= room:
        return text
    head = int(keeps * (room - 3))
    return f"{text[:head]} … {text[len(text) - (room - 3 - head) :]}"


def summary(history: Mapping[str, Sequence[float]]) -> Table:
    """Build a table of first, last, lowest and highest values."""
    table = Table("", box=None, pad_edge=False)
    for column in ("first", "last", "lowest", "highest"):
        table.add_column(column, justify="right")
    for label in (label for label in _SHOWN if history.get(label)):
        values = history[label]
        table.add_row(label, *(number(value) for value in (values[0], values[-1], min(values), max(values))))
    return table


def _pick(metrics: Mapping[str, float]) -> dict[str, float]:
    shown: dict[str, float] = {}
    for label, pattern in _SHOWN.items():
        head, _, tail = pattern.partition("*")
        found = [
            name for name in metrics if name == pattern or (tail and name.startswith(head) and name.endswith(tail))
        ]
        if found and not (label == _ONLY_WITHOUT_REWARD and "reward/mean" in metrics):
            shown[label] = metrics[found[0]]
    return shown


def number(value: float) -> str:
    """Format with about three significant digits: 0.531, 12.3, 128, 1.2k, 3.4M."""
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:.1f}M"
    if size >= 1e4:
        return f"{value / 1e3:.0f}k"
    if size >= 1e3:
        return f"{value / 1e3:.1f}k"
    if size >= 100:
        return f"{value:.0f}"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.3f}" if size >= 1e-3 or not size else f"{value:.1e}"


def duration(seconds: float) -> str:
    """Format a duration: `45s`, `3m20s`, `2h05m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def _bar(console: Console, total: int) -> Progress:
    whole = Column(no_wrap=True, min_width=len(f"{total}/{total}"))  # in 80 columns, truncate metrics, not the count
    rest = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    return Progress(
        BarColumn(bar_width=min(24, console.width // 8)),
        MofNCompleteColumn(table_column=whole),
        TextColumn("{task.fields[line]}", markup=False, table_column=rest),
        console=console,
        redirect_stdout=True,
        redirect_stderr=True,
        expand=True,
    )
