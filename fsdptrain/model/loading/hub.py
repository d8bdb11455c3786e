"""Download checkpoints from the Hub."""

import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from huggingface_hub import snapshot_download

from fsdptrain.distributed import any_rank, one_line, raise_on_all_ranks
from fsdptrain.errors import CheckpointError
from fsdptrain.model.loading.formats import with_config

log = logging.getLogger(__name__)

WEIGHT_FILES = ["*.safetensors"]
HUB_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py"]
NOT_HUB_FILES = ["original/*", "metal/*", "onnx/*", "consolidated*"]  # the same weights in other formats


def resolve_config(name: str) -> Path:
    """Return the local folder with the config.json of `name`, as in `resolve_checkpoint`. The weights may be missing.

    For single-process commands. Raises CheckpointError.
    """
    path = Path(name)
    if not path.is_dir() and not path.is_absolute():
        path = download(name, ["*.json", "*.py"])
    return with_config(path)


def download_once(name: str, *, weights: bool) -> Path:
    """Download `name` on one rank per node, with its weights or without. Returns the folder. Collective."""
    patterns = [*HUB_FILES, *WEIGHT_FILES] if weights else HUB_FILES
    downloads = os.environ.get("LOCAL_RANK", "0") == "0"
    if downloads:
        log.info("--hf-checkpoint %s: no local folder; looking it up on the hub", name)
    with raise_on_all_ranks(CheckpointError, f"--hf-checkpoint {name}"):
        run_long(partial(download, name, patterns) if downloads else None)  # the others wait however long it takes
    with raise_on_all_ranks(CheckpointError, f"--hf-checkpoint {name}"):
        return download(name, patterns, local_files_only=True)


def download(name: str, patterns: list[str], *, local_files_only: bool = False) -> Path:
    """Download `name` from the Hub. Raises CheckpointError."""
    try:
        found = snapshot_download(
            name, allow_patterns=patterns, ignore_patterns=NOT_HUB_FILES, local_files_only=local_files_only
        )
    except (OSError, ValueError) as error:  # of huggingface_hub: no such name, no access, no network
        raise CheckpointError(
            f"--hf-checkpoint {name} is not a local folder, and cannot be downloaded from the hub: {one_line(error)}"
        ) from error
    return Path(found)


def run_long(work: Callable[[], object] | None) -> None:
    """Run `work` of some ranks, None on the others, while all talk: it may take longer than --dist-timeout. Collective.

    Raises, on the ranks whose `work` raised, what it raised.
    """
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            if work is not None:
                work()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)
        done.set()

    threading.Thread(target=run, daemon=True, name="long work").start()
    while any_rank(not done.wait(1.0)):
        pass
    if errors:
        raise errors[0]
