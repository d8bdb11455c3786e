"""What the evaluations of a run decide: the best step, which checkpoints to keep, and when to stop."""

import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fsdptrain.checkpoints import list_checkpoints, step_of
from fsdptrain.config import Config
from fsdptrain.config.eval_sets import UNNAMED, eval_sets
from fsdptrain.config.stop_when import StopWhen
from fsdptrain.distributed import gather, raise_on_all_ranks
from fsdptrain.errors import CheckpointError, ConfigError
from fsdptrain.registry import suggest
from fsdptrain.trainer.run_dir import RunFolder
from fsdptrain.types import Metrics

log = logging.getLogger(__name__)

_LOWER_IS_BETTER = ("loss", "perplexity", "truncated", "unscored")  # last parts of the names


class Evaluations:
    """The evaluations of a run by step, and what they decide. Equal on all ranks."""

    def __init__(self, config: Config, stored: Iterable[tuple[int, Mapping[str, Any]]] = ()) -> None:
        """stored: `rows` of the checkpoint to resume from."""
        run = config.run
        first = f"eval/{next(iter(eval_sets(config)))}/{'accuracy' if config.generates else 'loss'}"
        self.metric = run.eval_metric or first.replace(f"{UNNAMED}/loss", "loss")
        self._sign = 1.0 if self.metric.endswith(_LOWER_IS_BETTER) else -1.0  # to sort by
        self._keep_best, self._patience = run.keep_best, run.early_stop_evals
        self._rule = None if run.stop_when is None else StopWhen.parse(run.stop_when)
        self._found: dict[int, Metrics] = {
            int(step): {name: float(value) for name, value in values.items()} for step, values in stored
        }
        self._unchecked = {"--eval-metric": (self.metric, True)}  # flag -> metric, whether it is of evaluations
        if self._rule is not None:
            self._unchecked["--stop-when"] = (self._rule.metric, self._rule.of_evaluation)

    @property
    def rows(self) -> list[tuple[int, Metrics]]:
        """Every evaluation, oldest first, for a checkpoint."""
        return [*self._found.items()]

    @property
    def ranked(self) -> list[int]:
        """The trained steps of evaluations, best first; of equal ones, the earliest first. NaN has no rank."""
        return [step for step in self._order() if step > 0]

    @property
    def best(self) -> tuple[int, float] | None:
        """Step and value of the best evaluation. Step 0 is the model before training."""
        return next(((step, self._found[step][self.metric]) for step in self._order()), None)

    def is_kept(self, step: int) -> bool:
        """Return whether --keep-best keeps the checkpoint of a step. The model before training has none."""
        return step in self.ranked[: self._keep_best]

    def observe(self, values: Metrics, step: int, last: Metrics) -> str:
        """Take the metrics of a step or of its evaluation. last: the last value of every metric.

        Returns the option that ends the run, and why, or "". Raises ConfigError if the first metrics lack that of an
        option.
        """
        if values:
            self._take(values, step)
        last = last | next(reversed(self._found.values()), {})  # callbacks may evaluate more often
        if self._rule is not None and self._rule.holds(last):
            return f"--stop-when {self._rule.text} (it is {last[self._rule.metric]:g})"
        best, value = self.best or (0, math.nan)
        if 0 < self._patience <= sum(each > best for each in self._found):
            return f"--early-stop-evals {self._patience} (best {self.metric}: {value:g} at step {best})"
        return ""

    def _take(self, values: Metrics, step: int) -> None:
        is_evaluation = all(name.startswith("eval/") for name in values)
        for flag in [flag for flag, (_, of_evaluation) in self._unchecked.items() if of_evaluation == is_evaluation]:
            name, _ = self._unchecked.pop(flag)
            if name not in values:
                what = "evaluations have" if is_evaluation else "steps have"
                raise ConfigError(f"{flag}: no metric {name}{suggest(name, values)}; {what} {', '.join(values)}")
        if is_evaluation:
            self._found[step] = values

    def _order(self) -> list[int]:
        found = {step: values.get(self.metric, math.nan) for step, values in self._found.items()}
        return sorted((step for step in found if not math.isnan(found[step])), key=lambda x: (self._sign * found[x], x))

    def tell_best(self, run: Path) -> None:
        """Log the best step, and its checkpoint if there is one."""
        if self.best is not None:
            step, value = self.best
            kept = "".join(f", in {path}" for path in list_checkpoints(run) if step_of(path) == step)
            kept += ", before training" if step == 0 else ""
            log.info("best %s: %g at step %d%s", self.metric, value, step, kept)


def open_evaluations(config: Config, folder: RunFolder) -> Evaluations:
    """Return the evaluations up to the checkpoint that the run resumes from. Collective.

    None of them if data, rewards or models have changed, which --resume CHECKPOINT allows: values do not compare.
    """
    progress = folder.progress or {}
    before = progress.get("inputs", {})
    changed = gather(any(before.get(name, digest) != digest for name, digest in folder.inputs.items()))[0]
    with raise_on_all_ranks(CheckpointError, f"--resume: checkpoint {folder.checkpoint}"):
        return Evaluations(config, [] if changed else progress.get("evaluations", []))
