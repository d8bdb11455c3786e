"""Locate and validate the files of a checkpoint."""

import json
import logging
from pathlib import Path

from safetensors import SafetensorError, safe_open

from fsdptrain.distributed import gather, raise_on_all_ranks
from fsdptrain.errors import CheckpointError
from fsdptrain.model.loading.formats import with_config

log = logging.getLogger(__name__)

SHOWN = 3  # number of names in an error message


def resolve_checkpoint(name: str, *, weights: bool = True) -> Path:
    """Return the local folder of `name`, a folder or a Hub repository. One rank per node downloads it.

    weights: whether the weights must be in it; without, they are not downloaded.

    Raises:
        CheckpointError: no such folder or repository, no network, or no config.json and safetensors in it.
    """
    path = Path(name)
    if not any(gather(path.is_dir())) and not path.is_absolute():
        from fsdptrain.model.loading.hub import download_once

        path = download_once(name, weights=weights)
    with raise_on_all_ranks(CheckpointError, f"--hf-checkpoint {name}"):
        return _checked(path, weights=weights)


def weight_files(path: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint. Raises CheckpointError if one is missing, corrupt or truncated."""
    files = _named_files(path)
    for file in files:
        try:
            with safe_open(file, framework="pt"):  # compares the header with the file size
                pass
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"--hf-checkpoint {path}: {file.name} is broken ({error}): download or copy it again"
            ) from error
    return files


def _named_files(path: Path) -> list[Path]:
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        raise CheckpointError(
            f"--hf-checkpoint {path} has neither model.safetensors nor {index.name}; other formats, such as pickles "
            "(.bin), can be converted by transformers' save_pretrained"
        )
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        outside = [name for name in names if Path(name).is_absolute() or ".." in Path(name).parts]
        absent = [name for name in names if not (path / name).is_file()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"--hf-checkpoint {path}: {index.name} is broken ({error}): download it again") from error
    if outside:
        raise CheckpointError(
            f"--hf-checkpoint {path}: {index.name} names {some_of(outside)}, outside this folder: do not trust it"
        )
    if absent:
        raise CheckpointError(
            f"--hf-checkpoint {path} lacks {some_of(absent)}, which {index.name} names: download it again"
        )
    return [path / name for name in names]


def _checked(path: Path, *, weights: bool) -> Path:
    with_config(path)
    if weights:
        weight_files(path)
    return path


def different_files(path: Path) -> CheckpointError:
    """Return the error for ranks that read different files from the same path."""
    return CheckpointError(
        f"--hf-checkpoint {path} is not the same on all ranks: put it on a disk that all nodes share"
    )


def some_of(names: list[str]) -> str:
    """Return the first few of `names` and the number of the others."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
