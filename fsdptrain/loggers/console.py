"""Console output: a header, one line per step, and where the run is written."""

import errno
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from fsdptrain import __version__
from fsdptrain.checkpoints import list_checkpoints, step_of
from fsdptrain.config import Config

if TYPE_CHECKING:
    from fsdptrain.loggers import RunInfo

log = logging.getLogger(__name__)

_SHOWN = {  # label -> metric; `*` matches all evaluation sets
    "reward": "reward/mean",
    "std": "reward/std",
    "acc": "eval/*/accuracy",
    "eval loss": "eval/*loss",
    "loss": "loss/total",
    "teacher kl": "distill/reverse_kl",
    "len": "completion/length_mean",
    "cut": "completion/truncated_fraction",
    "grad": "optim/grad_norm",
    "tok/s": "perf/tokens_per_s",
}
_SECONDS_PER_LINE = 1.0
_ONLY_WITHOUT_REWARD = "loss"  # a supervised loss is informative, a policy loss is not


class ConsoleLogger:
    """Writes one line per step to stdout."""

    def __init__(self, info: "RunInfo", *, clock: Callable[[], float] = time.monotonic) -> None:
        self._info = info
        self._clock = clock
        self._started = clock()
        self._last_line, self._has_logged = -math.inf, False
        self._first_step = self._last_step = info.resumed_step or 0
        self._pace_from: tuple[int, float] | None = None  # first step of this process and when it ended
        _print(header(info))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._last_step, self._has_logged = step, True
        shown, eta = _pick(metrics), self._eta(step)
        if shown and self._due(step, metrics):
            total = self._info.total_steps
            count = f"step {step:>{len(str(total))}}/{total}  " if total else ""  # else only an evaluation
            _print(f"{count}{shown}  {eta}".rstrip())

    def log_samples(self, samples: Sequence[Mapping[str, object]], step: int) -> None:
        """Show none: they are in samples.jsonl."""

    def close(self) -> None:
        end = f"{duration(self._clock() - self._started)}, written to {self._info.output_dir}"
        if self._last_step >= self._info.total_steps:
            if self._info.total_steps or self._has_logged:  # else an evaluation that failed
                _print(f"done in {end}")
            return
        saved = list_checkpoints(self._info.output_dir)
        resume_hint = "there is no checkpoint yet (--save-interval)"
        if saved:
            resume_hint = f"rerun the same command to resume after step {step_of(saved[-1])}"
            run = self._info.config and self._info.config.run
            if run and (run.stop_when or run.early_stop_evals):
                resume_hint = f"the newest checkpoint is of step {step_of(saved[-1])}"
        _print(f"stopped after step {self._last_step} of {self._info.total_steps}, {end}; {resume_hint}")

    def _due(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Return whether to print a line: of each step, but of short ones once a second; and of each evaluation."""
        is_short = self._clock() - self._last_line < _SECONDS_PER_LINE
        is_edge = step in (self._first_step + 1, self._info.total_steps)
        if is_short and not is_edge and not any(name.startswith("eval/") for name in metrics):
            return False
        self._last_line = self._clock()
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


def _print(text: str) -> None:
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):  # `| head`, or a terminal that is gone
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        log.warning("stdout is closed: the run continues without printing its steps; see metrics.jsonl")


def header(info: "RunInfo") -> str:
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
    model, data = config.model.hf_checkpoint, config.data
    if not config.run.num_rollout:
        model = model if config.run.resume in ("auto", "never") else config.run.resume
        rows = ", ".join(data.eval_prompt_data) or f"held-out rows of {data.prompt_data}"
        return [f"  evaluation of {model} ({config.compute_dtype_name}) on {rows}"]
    return [
        f"  {algorithm} of {model} ({config.compute_dtype_name}) on {data.prompt_data}",
        f"  {config.run.num_rollout} x {size}, lr {config.optim.lr:g} {config.optim.lr_decay_style}",
    ]


def _pick(metrics: Mapping[str, float]) -> str:
    """Format the metrics to show: `reward 0.531  len 128  grad 0.310  tok/s 1.2k`."""
    shown: dict[str, float] = {}
    for label, pattern in _SHOWN.items():
        matches = [name for name in metrics if fnmatchcase(name, pattern) and "_greedy/" not in name]
        if not (label == _ONLY_WITHOUT_REWARD and "reward/mean" in metrics):
            shown |= {label + f" {name.split('/')[1]}" * (len(matches) > 1): metrics[name] for name in matches}
    return "  ".join(f"{label} {number(value)}" for label, value in shown.items())


def number(value: float) -> str:
    """Format with two or three significant digits: 0.531, 12.3, 128, 1k, 1.2k, 3.4M."""
    size = abs(value)
    for least, unit in ((1e6, "M"), (1e3, "k")):
        if size >= 0.9995 * least:  # is rounded to it
            return f"{value / least:.{0 if unit == 'k' and size >= 1e4 else 1}f}".removesuffix(".0") + unit
    if size >= 1:
        return f"{value:.{0 if size >= 99.95 else 1 if size >= 9.9995 else 3}f}"
    return f"{value:.3f}" if size >= 1e-3 or not size else f"{value:.1e}"


def duration(seconds: float) -> str:
    """Format a duration: `45s`, `3m20s`, `2h05m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
