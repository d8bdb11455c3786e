"""The checkpoints in the folder of a run, found by name. No torch: commands look for them before they import it."""

import re
import shutil
from contextlib import suppress
from pathlib import Path

from fsdptrain.errors import CheckpointError

CONFIG_FILE, PROGRESS_FILE = "config.yaml", "progress.json"  # of a run, and of each checkpoint
EXPORT = "hf"  # in the folder of a run: the exported model
_FOLDER = re.compile(r"step_\d{8}")


def list_checkpoints(run: Path) -> list[Path]:
    """Return the folders of all checkpoints of the run, oldest first."""
    folder = run / "checkpoints"
    return sorted(path for path in folder.iterdir() if _FOLDER.fullmatch(path.name)) if folder.is_dir() else []


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def newest_checkpoint(run: Path) -> Path | None:
    """Return the newest complete checkpoint of the run, as seen by rank 0. Collective."""
    from fsdptrain.distributed import gather

    return gather(next(reversed(list_checkpoints(run)), None))[0]


def check_resume(resume: str) -> None:
    """Raise CheckpointError if --resume names no folder."""
    if resume not in ("auto", "never") and not Path(resume).is_dir():
        raise CheckpointError(f"--resume {resume} is not there: it is auto, never, or a folder checkpoints/step_*")


def set_aside(checkpoint: Path) -> Path:
    """Rename a checkpoint, so that no run resumes from it. The next one that is written deletes it."""
    target = checkpoint.with_name(f".old-{checkpoint.name}")
    shutil.rmtree(target, ignore_errors=True)
    return checkpoint.rename(target)


def touch_private(path: Path) -> None:
    """Create a file that only its owner can read, or make it one: older versions did not."""
    path.touch(mode=0o600)
    with suppress(PermissionError):  # it is of another user
        path.chmod(0o600)
