"""The folder of a run: what it holds, and whether this run may go on in it."""

import json
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdptrain.config import Config, load_recipe, to_yaml
from fsdptrain.config.keys import all_keys
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import CheckpointError, ConfigError
from fsdptrain.fsdp.checkpoint import CheckpointFolder

log = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"
_SEEN = 60.0  # [s] for a network file system to show what rank 0 has written
_NOT_LEARNED = {  # sections and keys that may change without a word
    *("launch", "log", "output_dir", "num_rollout", "resume", "save_interval", "keep_last", "async_save", "export"),
    *("eval_interval", "n_samples_per_eval_prompt", "eval_temperature", "eval_greedy"),
}
LAUNCH = "FSDPTRAIN_LAUNCH"  # set where ranks may be started again: name of the command that did so
PROGRESS_FILE = "progress.json"  # in a checkpoint: what the loop counts, beside what the backend saves


@dataclass(frozen=True)
class RunFolder:
    path: Path
    checkpoint: Path | None  # to go on from; None: the run begins
    progress: dict[str, Any] | None  # of that checkpoint

    @property
    def resumed_step(self) -> int | None:
        return None if self.progress is None else self.progress["step"]

    def write_config(self, config: Config) -> None:
        """Leave the resolved configuration, once the run has begun: one that is refused changes nothing. Collective."""
        with raise_on_all_ranks(ConfigError, f"--output-dir {self.path} cannot be written: choose another"):
            if dist.get_rank() == 0:
                self.path.mkdir(parents=True, exist_ok=True)
                (self.path / CONFIG_FILE).write_text(to_yaml(config))
        if config.run.keep_last or config.run.export:  # each rank writes its part
            with raise_on_all_ranks(ConfigError, f"--output-dir {self.path}"):
                self._require_shared(min(_SEEN, config.launch.dist_timeout / 2))

    def _require_shared(self, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        while not (self.path / CONFIG_FILE).exists():
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"--output-dir {self.path} is another folder on another machine: choose one that all of them share"
                )
            time.sleep(0.1)


def open_folder(config: Config) -> RunFolder:
    """Whether --output-dir may be used, and the checkpoint in it to resume from. Collective."""
    folder = Path(config.run.output_dir)
    with raise_on_all_ranks(ConfigError, f"--output-dir {folder}"):
        if dist.get_rank() == 0:
            _refuse_used_folder(config, folder)
    checkpoint = _checkpoint_to_resume(config, folder)
    progress = None
    if checkpoint is not None:
        with raise_on_all_ranks(CheckpointError, f"--resume: checkpoint {checkpoint} cannot be read"):
            progress = json.loads((checkpoint / PROGRESS_FILE).read_text())
            _tell_changes(config, checkpoint, progress["step"])
    return RunFolder(folder, checkpoint, progress)


def _tell_changes(config: Config, checkpoint: Path, step: int) -> None:
    """A run may go on with other values, and says so; of a finished run nothing is left that they could change."""
    written = checkpoint.parent.parent / CONFIG_FILE
    changes = changed_values(load_recipe(written), config) if written.is_file() else []
    if changes and step >= config.run.num_rollout:
        raise ConfigError(
            f"{checkpoint} is the end of a run of {step} rollouts, so {changes[0]} would have no effect: "
            "choose another --output-dir, or a larger --num-rollout to go on"
        )
    for change in changes:
        log.warning("goes on after step %d with %s", step, change)


def changed_values(before: Config, now: Config) -> list[str]:
    """`--lr 0.001 in place of 1e-06` for each option that takes part in what is learned."""
    changes: list[str] = []
    for key in all_keys().values():
        if key.section in _NOT_LEARNED or key.name in _NOT_LEARNED:
            continue
        old, new = (key.value(config) for config in (before, now))
        if old != new:
            changes.append(f"{key.flag} {new} in place of {old}")
    return changes


def _refuse_used_folder(config: Config, folder: Path) -> None:
    if config.run.resume == "never" and (folder / CONFIG_FILE).exists():
        raise ConfigError(
            f"--output-dir {folder} holds a run already: choose another folder, or go on with it by --resume auto"
        )


def _checkpoint_to_resume(config: Config, folder: Path) -> Path | None:
    if config.run.resume == "never":
        return None
    if config.run.resume == "auto":
        return CheckpointFolder(folder, keep_last=config.run.keep_last).latest()
    newest = CheckpointFolder(folder, keep_last=config.run.keep_last).latest()
    checkpoint = Path(config.run.resume)
    with raise_on_all_ranks(CheckpointError, f"--resume {checkpoint}"):
        if newest is not None and LAUNCH in os.environ and _launch_of(newest) == os.environ[LAUNCH]:
            return newest  # ranks that were started again: the run has gone on from `checkpoint` already
        if not checkpoint.is_dir():
            raise CheckpointError(
                f"--resume {checkpoint} is not there: it is auto, never, or a folder checkpoints/step_*"
            )
    return checkpoint


def _launch_of(checkpoint: Path) -> str | None:
    return json.loads((checkpoint / PROGRESS_FILE).read_text()).get("launch")
