"""Where an export may be written: only an earlier export is replaced, and only by a complete one.

Files that were added to the earlier export, such as a model card, are kept. A model that was put there is refused.
"""

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from fsdptrain.errors import CheckpointError
from fsdptrain.fsdp.checkpoint_folder import sync_tree

_TEMPORARY = ".fsdptrain-"
MARKER = "fsdptrain_export.json"  # in every export: the names of its files and folders
MODEL_FILES = ["*.safetensors", "*.index.json", "adapter_config.json"]  # would load in place of the exported model


def check_target(target: Path, *, flag: str, sources: Iterable[str | None] = ()) -> None:
    """Raise CheckpointError unless `target` is missing, empty or an export. sources: models that the run reads."""
    real = target.resolve()
    if real == Path.cwd():
        reason = "it is the current folder"
    elif any(source and os.path.exists(source) and Path(source).resolve().is_relative_to(real) for source in sources):
        reason = "it is or holds a model that this run reads"
    elif not (existing := next(path for path in (real, *real.parents) if path.exists())).is_dir():
        reason = f"{existing} is a file"
    elif foreign := _foreign(real):
        reason = f"it holds {foreign}, which is not of an export; move it away"
    else:
        return
    raise CheckpointError(f"{flag}: the model cannot be written to {target}: {reason}; choose another folder")


def temporary_of(target: Path) -> Path:
    """Return the folder beside `target` in which the export is prepared."""
    return target.resolve().with_name(f"{_TEMPORARY}{target.resolve().name}")


def publish_folder(target: Path) -> None:
    """Make the complete folder `temporary_of(target)` durable and rename it to `target`, replacing an older export."""
    temporary = temporary_of(target)
    check_target(target, flag=f"the export is complete in {temporary}")
    target = target.resolve()
    names = sorted(path.name for path in temporary.iterdir())
    for path in (target / name for name in _added(target) if name not in names):
        copy = shutil.copytree if path.is_dir() else shutil.copyfile
        copy(path, temporary / path.name)
    (temporary / MARKER).write_text(json.dumps({"written_by": "fsdptrain", "files": names}, indent=2) + "\n")
    sync_tree(temporary)
    old = temporary.with_name(f"{temporary.name}-old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    temporary.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _foreign(folder: Path) -> str:
    """Return something in `folder` that an export must not replace and does not keep, or ""."""
    added = _added(folder)
    is_export = (folder / MARKER).is_file() and MARKER not in added
    models = (name for name in added if (folder / name / MARKER).exists() or any(map(Path(name).match, MODEL_FILES)))
    return next(models if is_export else iter(added), "")


def _added(folder: Path) -> list[str]:
    """Return what in `folder` no export wrote. An export may hold another, of its adapter."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    try:
        written = set(json.loads((folder / MARKER).read_text())["files"]) if MARKER in names else set[str]()
    except (ValueError, KeyError, TypeError, RecursionError):
        return [MARKER]
    exports = (name for name in names if (folder / name / MARKER).is_file() and not _added(folder / name))
    known = {MARKER, *written, *exports}
    return [name for name in names if name not in known and not name.startswith(_TEMPORARY)]
