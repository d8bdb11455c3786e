"""The output folder of a run: its configuration and the checkpoint to resume from."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdptrain.checkpoints import CONFIG_FILE, EXPORT, list_checkpoints, newest_checkpoint, set_aside, touch_private
from fsdptrain.config import Config, to_yaml
from fsdptrain.distributed import any_rank, raise_on_all_ranks
from fsdptrain.errors import CheckpointError, ConfigError
from fsdptrain.rank_variables import read_rank_variables

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunFolder:
    path: Path
    checkpoint: Path | None  # checkpoint to resume from; None: a new run
    progress: dict[str, Any] | None  # contents of `PROGRESS_FILE` in that checkpoint
    restarted: bool = False  # by torchrun, after the start, whose config.yaml stays, with its time
    inputs: Mapping[str, str] = field(default_factory=dict)  # digests: `bind_inputs`

    @property
    def resumed_step(self) -> int | None:
        return None if self.progress is None else self.progress["step"]

    def start(self, config: Config, step: int) -> None:
        """Write the resolved configuration, and set aside the checkpoints after `step`. Collective.

        Call it only once the run has started, so that a rejected run changes nothing.
        """
        with raise_on_all_ranks(ConfigError, f"--output-dir {self.path} cannot be written: choose another"):
            if dist.get_rank() == 0:
                self.path.mkdir(parents=True, exist_ok=True)
                if not self.restarted:
                    touch_private(self.path / CONFIG_FILE)  # mappings may hold keys
                    (self.path / CONFIG_FILE).write_text(to_yaml(config))
                later = [path for path in list_checkpoints(self.path) if int(path.name.removeprefix("step_")) > step]
                for path in later if config.run.num_rollout else ():  # else an evaluation
                    log.warning("%s is set aside: the run continues from step %d", path, step)
                    set_aside(path)


def open_folder(config: Config) -> RunFolder:
    """Find the checkpoint to resume from. Collective. Raises ConfigError if --output-dir cannot be used."""
    folder = Path(config.run.output_dir)
    variables = read_rank_variables()
    restarted = any_rank(variables is not None and variables.restart > 0)  # machines may count restarts differently
    with raise_on_all_ranks(ConfigError, f"--output-dir {folder}"):
        if dist.get_rank() == 0 and not restarted:
            if (checkpoints := folder / "checkpoints").exists() and not checkpoints.is_dir():
                raise ConfigError(
                    f"--output-dir {folder}: {checkpoints.name} is a file: move it away, or choose another folder"
                )
            if config.run.resume == "never" and (folder / CONFIG_FILE).exists():
                raise ConfigError(
                    f"--output-dir {folder} holds a run already: choose another folder, or continue it by --resume auto"
                )
    checkpoint = newest_checkpoint(folder)
    if config.run.resume != "auto":
        from fsdptrain.trainer.resuming import choose_checkpoint

        checkpoint = choose_checkpoint(config, folder, checkpoint, restarted=restarted)
    if restarted:
        from fsdptrain.trainer.resuming import is_of_command

        restarted = is_of_command(folder / CONFIG_FILE, config)
    progress = None
    with raise_on_all_ranks(CheckpointError, f"--resume: checkpoint {checkpoint} cannot be read"):
        if dist.get_rank() == 0:
            if (folder / EXPORT).exists() or any(folder.glob("checkpoints/step_*")):
                from fsdptrain.trainer.resuming import refuse_other_experiment

                refuse_other_experiment(config, folder, checkpoint)
            if config.run.export:
                from fsdptrain.fsdp.export_folder import check_target

                sources = (config.model.hf_checkpoint, config.ref.load)
                check_target(folder / EXPORT, flag=f"--output-dir {folder}", sources=sources)
        if checkpoint is not None:
            from fsdptrain.trainer.resuming import read_progress, tell_changes

            progress = read_progress(checkpoint)
            tell_changes(config, checkpoint, progress["step"])
    return RunFolder(folder, checkpoint, progress, restarted)
