"""The checkpoints in the folder of a run, found by name. No torch: commands look for them before they import it."""

import re
from pathlib import Path

from fsdptrain.errors import ConfigError

CONFIG_FILE, PROGRESS_FILE = "config.yaml", "progress.json"  # of a run, and of each checkpoint
EXPORT = "hf"  # in the folder of a run: the exported model
_FOLDER = re.compile(r"step_\d{8}")


def list_checkpoints(run: Path) -> list[Path]:
    """Return the folders of all checkpoints of the run, oldest first."""
    folder = run / "checkpoints"
    return sorted(path for path in folder.iterdir() if _FOLDER.fullmatch(path.name)) if folder.is_dir() else []


def is_run(path: Path) -> bool:
    """Return whether `path` is the folder of a run."""
    return (path / CONFIG_FILE).is_file() and not (path / PROGRESS_FILE).is_file()


def newest_checkpoint(run: Path) -> Path:
    """Return the newest checkpoint of the run. Raises ConfigError if it has none."""
    found = list_checkpoints(run)
    if not found:
        model = run / EXPORT
        exported = f"; its exported model is {model}" if model.is_dir() else ""
        raise ConfigError(f"{run} has no checkpoint in {run / 'checkpoints'}{exported}")
    return found[-1]
