"""The folder of a run: what it holds, and whether this run may go on in it."""

from pathlib import Path

import torch.distributed as dist

from fsdptrain.config import Config, to_yaml
from fsdptrain.errors import CheckpointError, ConfigError
from fsdptrain.fsdp.checkpoint import CheckpointFolder
from fsdptrain.models.collective import together

CONFIG_FILE = "config.yaml"


def open_folder(config: Config) -> tuple[Path, Path | None]:
    """Make --output-dir, leave the resolved configuration there, and find the checkpoint to resume from. Collective."""
    folder = Path(config.run.output_dir)
    with together(ConfigError, f"--output-dir {folder}"):
        if dist.get_rank() == 0:
            _refuse_used_folder(config, folder)
    checkpoint = _checkpoint_to_resume(config, folder)
    with together(ConfigError, f"--output-dir {folder} cannot be written: choose another"):
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / CONFIG_FILE).write_text(to_yaml(config))
    return folder, checkpoint


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
