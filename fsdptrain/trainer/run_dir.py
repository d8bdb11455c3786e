"""The output folder of a run: its configuration and the checkpoint to resume from."""

import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdptrain.checkpoints import CONFIG_FILE, EXPORT, PROGRESS_FILE
from fsdptrain.config import Config, to_yaml
from fsdptrain.config.keys import all_keys
from fsdptrain.config.rules import OnResume
from fsdptrain.distributed import any_rank, gather, raise_on_all_ranks
from fsdptrain.errors import CheckpointError, ConfigError
from fsdptrain.fsdp.checkpoint_folder import CheckpointFolder
from fsdptrain.loggers.jsonl import lines_until
from fsdptrain.rank_variables import read_rank_variables

log = logging.getLogger(__name__)

_MAX_SHOWN = 3  # changed options in an error


@dataclass(frozen=True)
class RunFolder:
    path: Path
    checkpoint: Path | None  # checkpoint to resume from; None: a new run
    progress: dict[str, Any] | None  # contents of `PROGRESS_FILE` in that checkpoint
    restarted: bool = False  # by torchrun: config.yaml keeps the time of the start
    inputs: Mapping[str, str] = field(default_factory=dict)  # digests: `bind_inputs`

    @property
    def resumed_step(self) -> int | None:
        return None if self.progress is None else self.progress["step"]

    def last_metrics(self) -> dict[str, float]:
        """Return the last value of every metric up to the checkpoint, as rank 0 logged it. Collective."""
        last: dict[str, Any] = {}
        if self.checkpoint is not None and self.resumed_step is not None and dist.get_rank() == 0:
            path = self.checkpoint.parent.parent / "metrics.jsonl"
            for line in lines_until(path, self.resumed_step) if path.is_file() else []:
                last |= json.loads(line)
        numbers = {name: math.nan if x is None else x for name, x in last.items() if name not in ("step", "time")}
        return gather(numbers)[0]

    def write_config(self, config: Config) -> None:
        """Write the resolved configuration. Collective.

        Call it only once the run has started, so that a rejected run changes nothing.
        """
        with raise_on_all_ranks(ConfigError, f"--output-dir {self.path} cannot be written: choose another"):
            if dist.get_rank() == 0:
                self.path.mkdir(parents=True, exist_ok=True)
                if not self.restarted or not (self.path / CONFIG_FILE).exists():
                    (self.path / CONFIG_FILE).write_text(to_yaml(config))


def open_folder(config: Config) -> RunFolder:
    """Find the checkpoint to resume from. Collective.

    Raises ConfigError if --output-dir cannot be used.
    """
    folder = Path(config.run.output_dir)
    variables = read_rank_variables()
    restarted = any_rank(variables is not None and variables.restart > 0)  # machines may count restarts differently
    with raise_on_all_ranks(ConfigError, f"--output-dir {folder}"):
        if dist.get_rank() == 0 and not restarted:
            _refuse_used_folder(config, folder)
    checkpoint = _checkpoint_to_resume(config, folder, restarted=restarted)
    progress = None
    with raise_on_all_ranks(CheckpointError, f"--resume: checkpoint {checkpoint} cannot be read"):
        if dist.get_rank() == 0:
            _refuse_other_experiment(config, folder, checkpoint)
            if config.run.export:
                from fsdptrain.fsdp.export_folder import check_target

                sources = (config.model.hf_checkpoint, config.ref.load)
                check_target(folder / EXPORT, flag=f"--output-dir {folder}", sources=sources)
        if checkpoint is not None:
            progress = _read_progress(checkpoint)
            _tell_changes(config, checkpoint, progress["step"])
    return RunFolder(folder, checkpoint, progress, restarted)


def _read_progress(checkpoint: Path) -> dict[str, Any]:
    """Raises CheckpointError for a file that no run has written."""
    found = json.loads((checkpoint / PROGRESS_FILE).read_text())
    if not isinstance(found, dict) or type(found.get("step")) is not int or found["step"] < 0:
        raise CheckpointError(f"--resume: {PROGRESS_FILE} of checkpoint {checkpoint} is not of a run: choose another")
    return found


def _refuse_other_experiment(config: Config, folder: Path, checkpoint: Path | None) -> None:
    """Raise ConfigError if `folder` holds another experiment, unless --resume names a checkpoint in it."""
    is_inside = checkpoint is not None and _is_same_path(str(checkpoint.parent.parent), str(folder))
    if is_inside and config.run.resume not in ("auto", "never"):
        return
    has_results = (folder / EXPORT).exists() or any(folder.glob("checkpoints/step_*"))
    others = changed_values(folder, config)[OnResume.REFUSED] if has_results else []
    if others:
        more = f" and {len(others) - _MAX_SHOWN} more" if len(others) > _MAX_SHOWN else ""
        remedy = f", or go on from its checkpoint on purpose by --resume {checkpoint}" if is_inside else ""
        raise ConfigError(
            f"--output-dir {folder} holds another experiment, this one has {', '.join(others[:_MAX_SHOWN])}{more}: "
            f"choose another --output-dir{remedy}"
        )


def _tell_changes(config: Config, checkpoint: Path, step: int) -> None:
    """Warn about options that differ from the run of the checkpoint.

    Raises ConfigError if the checkpoint is the end of a finished run, where changed options have no effect.
    """
    changes = changed_values(checkpoint.parent.parent, config)
    learned = changes[OnResume.REFUSED] + changes[OnResume.TUNING]
    if learned and step >= config.run.num_rollout > 0:  # an evaluation has other options on purpose
        raise ConfigError(
            f"{checkpoint} is the end of a run of {step} rollouts, so {learned[0]} would have no effect: "
            "choose another --output-dir, or a larger --num-rollout to go on"
        )
    if any(changes.values()) and config.run.num_rollout:
        log.warning("resumes after step %d with %s", step, ", ".join(chain(*changes.values())))


def changed_values(run: Path, now: Config) -> dict[OnResume, list[str]]:
    """Return the options that differ from the config of the folder `run`, e.g. `--lr 0.001 in place of 1e-06`."""
    changes: dict[OnResume, list[str]] = {kind: [] for kind in OnResume}
    if not (run / CONFIG_FILE).is_file():
        return changes
    from fsdptrain.config.recipe import load_recipe

    before = load_recipe(run / CONFIG_FILE)
    for key in all_keys().values():
        old, new = (key.value(config) for config in (before, now))
        if old != new and not _is_same_path(old, new):
            changes[key.on_resume].append(" ".join(f"{key.flag} {new} in place of {old}".split()))
    return changes


def _is_same_path(old: Any, new: Any) -> bool:
    """Return whether two values name the same file or folder."""
    are_paths = all(isinstance(path, str) and os.path.exists(path) for path in (old, new))
    return are_paths and os.path.samefile(old, new)


def _refuse_used_folder(config: Config, folder: Path) -> None:
    checkpoints = folder / "checkpoints"
    if checkpoints.exists() and not checkpoints.is_dir():
        raise ConfigError(
            f"--output-dir {folder}: {checkpoints.name} is a file: move it away, or choose another folder"
        )
    if config.run.resume == "never" and (folder / CONFIG_FILE).exists():
        raise ConfigError(
            f"--output-dir {folder} holds a run already: choose another folder, or go on with it by --resume auto"
        )


def _checkpoint_to_resume(config: Config, folder: Path, *, restarted: bool) -> Path | None:
    """Select the checkpoint. A restart of torchrun takes the newest one.

    If --resume names one of `folder`, later ones may be of the part that the run went back behind: then the newest
    that is younger than config.yaml, which the start of the run wrote.
    """
    newest = CheckpointFolder(folder, keep_last=config.run.keep_last).latest()
    names_one = config.run.resume not in ("auto", "never")
    rolls_back = names_one and Path(config.run.resume).resolve().is_relative_to(folder.resolve())
    if restarted and rolls_back and newest is not None:
        started = (folder / CONFIG_FILE).stat().st_mtime if (folder / CONFIG_FILE).is_file() else math.inf
        rolls_back = not any_rank(newest.stat().st_mtime > started)
    if config.run.resume == "auto" or (restarted and newest is not None and not rolls_back):
        return newest
    if config.run.resume == "never":
        return None
    checkpoint = Path(config.run.resume).resolve()
    with raise_on_all_ranks(CheckpointError, f"--resume {checkpoint}"):
        if not checkpoint.is_dir():
            raise CheckpointError(
                f"--resume {checkpoint} is not there: it is auto, never, or a folder checkpoints/step_*"
            )
    return checkpoint
