"""What a run takes from the folder that it goes on in: changed options, progress, and the last metrics."""

import json
import logging
import math
import os
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdptrain.checkpoints import CONFIG_FILE, PROGRESS_FILE, check_resume
from fsdptrain.config import Config
from fsdptrain.config.keys import all_keys
from fsdptrain.config.recipe import load_recipe
from fsdptrain.config.rules import OnResume
from fsdptrain.data.prompts import PromptStream
from fsdptrain.distributed import any_rank, gather, raise_on_all_ranks
from fsdptrain.errors import CheckpointError, ConfigError
from fsdptrain.loggers.rewind import lines_until
from fsdptrain.trainer.reporting import Reporter

log = logging.getLogger(__name__)

_MAX_SHOWN = 3  # changed options in an error


def choose_checkpoint(config: Config, folder: Path, newest: Path | None, *, restarted: bool) -> Path | None:
    """Return the checkpoint to resume from without --resume auto. A restart of torchrun takes the newest one.

    That must be younger than the config.yaml of this command: older ones are of an earlier run.
    """
    if restarted and newest is not None:
        mark = folder / CONFIG_FILE
        if any_rank(is_of_command(mark, config) and newest.stat().st_mtime > mark.stat().st_mtime):
            return newest
    if config.run.resume == "never":
        return None
    with raise_on_all_ranks(CheckpointError, "--resume"):
        check_resume(config.run.resume)
    return Path(config.run.resume).resolve()


def is_of_command(mark: Path, config: Config) -> bool:
    """Return whether the start of a run with this --resume wrote config.yaml, `mark`: before a restart, this run."""
    with suppress(ConfigError):
        return mark.is_file() and load_recipe(mark).run.resume == config.run.resume
    return False


def read_progress(checkpoint: Path) -> dict[str, Any]:
    """Raises CheckpointError for a file that no run has written."""
    found = json.loads((checkpoint / PROGRESS_FILE).read_text())
    if not isinstance(found, dict) or type(found.get("step")) is not int or found["step"] < 0:
        raise CheckpointError(f"--resume: {PROGRESS_FILE} of checkpoint {checkpoint} is not of a run: choose another")
    return found


def refuse_other_experiment(config: Config, folder: Path, checkpoint: Path | None) -> None:
    """Raise ConfigError if the results in `folder` are of other options, unless --resume names a checkpoint in it."""
    is_inside = checkpoint is not None and _is_same_path(str(checkpoint.parent.parent), str(folder))
    if is_inside and config.run.resume not in ("auto", "never"):
        return
    others = changed_values(folder, config)[OnResume.REFUSED]
    if others:
        more = f" and {len(others) - _MAX_SHOWN} more" if len(others) > _MAX_SHOWN else ""
        remedy = f", or go on from its checkpoint on purpose by --resume {checkpoint}" if is_inside else ""
        raise ConfigError(
            f"--output-dir {folder} holds another experiment, this one has {', '.join(others[:_MAX_SHOWN])}{more}: "
            f"choose another --output-dir{remedy}"
        )


def tell_changes(config: Config, checkpoint: Path, step: int) -> None:
    """Warn about options that differ from the run of the checkpoint.

    Raises ConfigError if the checkpoint is the end of a finished run, where changed options have no effect.
    """
    changes = changed_values(checkpoint.parent.parent, config)
    learned = changes[OnResume.REFUSED] + changes[OnResume.TUNING]
    if learned and step >= config.run.num_rollout > 0:  # an evaluation has other options on purpose
        raise ConfigError(
            f"{checkpoint} is the end of a run of {step} rollouts, so {learned[0]} would have no effect: "
            "choose another --output-dir, or a larger --num-rollout to continue"
        )
    if any(changes.values()) and config.run.num_rollout:
        log.warning("resumes after step %d with %s", step, ", ".join(chain(*changes.values())))


def changed_values(run: Path, now: Config) -> dict[OnResume, list[str]]:
    """Return the options that differ from the config of the folder `run`, e.g. `--lr 0.001 in place of 1e-06`."""
    changes: dict[OnResume, list[str]] = {kind: [] for kind in OnResume}
    if not (run / CONFIG_FILE).is_file():
        return changes
    before = load_recipe(run / CONFIG_FILE)
    for key in all_keys().values():
        old, new = (key.value(config) for config in (before, now))
        if old != new and not _is_same_path(old, new):
            if isinstance(old, dict) and isinstance(new, dict):  # whose values may be secrets
                names = (str(name) for name in {**old, **new} if old.get(name) != new.get(name))
                changes[key.on_resume].append(f"{key.flag} with other {', '.join(names)}")
            else:
                changes[key.on_resume].append(" ".join(f"{key.flag} {new} in place of {old}".split()))
    return changes


def _is_same_path(old: Any, new: Any) -> bool:
    """Return whether two values name the same file or folder."""
    old, new = (value[0] if isinstance(value, list) and len(value) == 1 else value for value in (old, new))
    are_paths = all(isinstance(path, str) and os.path.exists(path) for path in (old, new))
    return are_paths and os.path.samefile(old, new)


def restore(
    checkpoint: Path, progress: dict[str, Any], stream: PromptStream, report: Reporter, *, trains: bool
) -> None:
    """Go on from `progress`, of the checkpoint. trains: no evaluation, of maybe other data. Collective."""
    if trains:
        report.last = last_metrics(checkpoint, progress["step"])
    with raise_on_all_ranks(CheckpointError, f"--resume: checkpoint {checkpoint}"):
        if trains:
            stream.load_state_dict(progress["stream"])
        report.totals = {name: float(progress["totals"][name]) for name in report.totals}


def last_metrics(checkpoint: Path, step: int) -> dict[str, float]:
    """Return the last value of every metric up to the checkpoint, as rank 0 logged it. Collective."""
    last: dict[str, Any] = {}
    path = checkpoint.parent.parent / "metrics.jsonl"
    if dist.get_rank() == 0 and path.is_file():
        for line in lines_until(path, step):
            last |= json.loads(line)
    numbers = {name: math.nan if x is None else x for name, x in last.items() if name not in ("step", "time")}
    return gather(numbers)[0]
