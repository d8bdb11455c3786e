"""A checkpoint that cannot be written or read is a CheckpointError, whatever failed. One rank."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdptrain import platform
from fsdptrain.checkpoints import newest_checkpoint, set_aside
from fsdptrain.errors import CheckpointError
from fsdptrain.fsdp import checkpoint, checkpoint_folder, shard_files
from fsdptrain.fsdp.checkpoint_folder import MANIFEST, CheckpointFolder

OURS = {"class": "Tiny", "num_parameters": 3, "tensors": "abc"}


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with platform.process_group(60):
        yield


def save(folder: Path) -> None:
    checkpoint.write_state(folder, step=3, model=OURS, optimizer={})
    shard_files.write_shards(folder / "shards", {"model.a": torch.arange(4.0), "model.b": torch.ones(2)})


def written(directory: Path) -> Path:
    folder = CheckpointFolder(directory, keep_last=1).write(3, save)
    assert folder is not None
    return folder


def change_state(folder: Path, **values: Any) -> None:
    """Change the state file, and the manifest with it."""
    state = folder / checkpoint._STATE
    state.write_text(json.dumps(json.loads(state.read_text()) | values))
    (folder / MANIFEST).write_text(json.dumps(checkpoint_folder._sizes(folder)))


def test_tensors_share_files_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_files, "_FILE_BYTES", 100)
    tensors = {name: torch.zeros(size // 4) for name, size in {"a": 40, "b": 40, "c": 40, "d": 200, "e": 4}.items()}
    assert shard_files._file_plan(tensors) == {"a": 1, "b": 1, "c": 1, "d": 2, "e": 3}


@pytest.mark.parametrize("name", ["_prepare", "_sizes", "sync_tree"])
def test_an_error_of_the_disk_at_any_stage_names_the_option(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    later = tmp_path / "checkpoints" / "step_00000005"
    later.mkdir(parents=True)
    aside = set_aside(later)
    with monkeypatch.context() as broken:
        broken.setattr(CheckpointFolder if name == "_prepare" else checkpoint_folder, name, full)
        words = r"--output-dir: cannot write checkpoint .*step_00000003.* No space left"
        with pytest.raises(CheckpointError, match=words):
            CheckpointFolder(tmp_path, keep_last=1).write(3, save)
    assert newest_checkpoint(tmp_path) is None
    assert aside.exists()  # until another one is written
    CheckpointFolder(tmp_path, keep_last=1).write(3, save)
    assert not aside.exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": 99}, "has format 99, not 5"),
        (
            {"model": OURS | {"adapter": "rank 8"}},
            r"is of another model \(Tiny, 3 parameters, tensors abc, rank 8\)",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_with_a_remedy(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    folder = written(tmp_path)
    checkpoint.read_state(folder, OURS)
    change_state(folder, **changes)
    with pytest.raises(CheckpointError, match=f"{words}.*--resume never"):
        checkpoint.read_state(folder, OURS)


def test_tensors_that_cannot_be_read_are_refused_with_the_cause(tmp_path: Path) -> None:
    folder = written(tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot be read \(.*model\.c.*\): .*--resume never"):
        shard_files.read_shards(folder / "shards", {"model.c": torch.zeros(4)}, remedy="--resume never")
