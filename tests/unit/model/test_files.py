"""A checkpoint is complete, or one line names the missing file."""

from pathlib import Path

import pytest

from fsdptrain.errors import CheckpointError
from fsdptrain.model.loading.files import resolve_checkpoint, some_of, weight_files
from tests.testing import save_tiny_checkpoint


def test_files_are_those_of_the_index(tmp_path: Path):
    save_tiny_checkpoint(tmp_path)
    assert resolve_checkpoint(str(tmp_path)) == tmp_path
    assert weight_files(tmp_path) == sorted(tmp_path.glob("*.safetensors"))
    assert len(weight_files(tmp_path)) > 1


def test_a_missing_file_is_named(tmp_path: Path):
    save_tiny_checkpoint(tmp_path)
    for file in weight_files(tmp_path)[1:]:
        file.rename(tmp_path / "aside")
        with pytest.raises(CheckpointError, match=f"lacks {file.name}"):
            resolve_checkpoint(str(tmp_path))
        (tmp_path / "aside").rename(file)


def test_a_name_that_is_neither_a_folder_nor_on_the_hub_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        CheckpointError, match="--hf-checkpoint nobody/nothing is not a local folder, was not downloaded"
    ):
        resolve_checkpoint("nobody/nothing")


def test_a_path_that_cannot_be_a_hub_name_is_refused_as_a_path():
    with pytest.raises(
        CheckpointError, match=r"--hf-checkpoint runs/start/hf is not a local folder, .* is it misspelt"
    ):
        resolve_checkpoint("runs/start/hf")


def test_long_lists_are_cut():
    assert some_of(["a", "b"]) == "a, b"
    assert some_of(list("abcdef")) == "a, b, c and 3 more"
