"""The folder of a run: what it holds, and whether this run may go on in it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdptrain.config import Config, to_yaml
from fsdptrain.errors import CheckpointError, ConfigError
from fsdptrain.fsdp.checkpoint import CheckpointFolder
from fsdptrain.models.collective import together

CONFIG_FILE = "config.yaml"
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
        with together(ConfigError, f"--output-dir {self.path} cannot be written: choose another"):
            if dist.get_rank() == 0:
                self.path.mkdir(parents=True, exist_ok=True)
                (self.path / CONFIG_FILE).write_text(to_yaml(config))


def open_folder(config: Config) -> RunFolder:
    """Whether --output-dir may be used, and the checkpoint in it to resume from. Collective."""
    folder = Path(config.run.output_dir)
    with together(ConfigError, f"--output-dir {folder}"):
        if dist.get_rank() == 0:
            _refuse_used_folder(config, folder)
    checkpoint = _checkpoint_to_resume(config, folder)
    progress = None
    if checkpoint is not None:
        with together(CheckpointError, f"--resume: checkpoint {checkpoint} cannot be read"):
            progress = json.loads((checkpoint / PROGRESS_FILE).read_text())
    return RunFolder(folder, checkpoint, progress)


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
    checkpoint = Path(config.run.resume)
    with together(CheckpointError, f"--resume {checkpoint}"):
        if not checkpoint.is_dir():
            raise CheckpointError(
                f"--resume {checkpoint} is not there: it is auto, never, or a folder checkpoints/step_*"
            )
    return checkpoint
