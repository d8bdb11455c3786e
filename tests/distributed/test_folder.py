"""The folder of a run is one for all ranks, and ranks that are started again go on where their own run was."""

import json

import pytest
import torch.distributed as dist

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.errors import ConfigError
from fsdptrain.testing import spawn
from fsdptrain.trainer.run_dir import LAUNCH, PROGRESS_FILE, RunFolder, open_folder


def checkpoint(folder, step, launch):
    path = folder / f"checkpoints/step_{step:08d}"
    path.mkdir(parents=True)
    (path / PROGRESS_FILE).write_text(json.dumps({"step": step, "launch": launch}))
    return path


@pytest.mark.parametrize(("launch", "step"), [("ours", 3), ("another", 1), (None, 1)])
def test_after_a_restart_resume_dir_does_not_take_the_run_back_once_more(tmp_path, monkeypatch, launch, step):
    first = checkpoint(tmp_path, 1, None)
    checkpoint(tmp_path, 2, "ours")
    checkpoint(tmp_path, 3, "ours")
    if launch is None:
        monkeypatch.delenv(LAUNCH, raising=False)
    else:
        monkeypatch.setenv(LAUNCH, launch)
    with platform.process_group(10):
        folder = open_folder(Config(hf_checkpoint="x", output_dir=str(tmp_path), resume=str(first)))
    assert folder.resumed_step == step


def write_config(folders):
    folder = folders[dist.get_rank()]
    try:
        RunFolder(folder, None, None).write_config(Config(hf_checkpoint="x", output_dir=str(folder), dist_timeout=4))
    except ConfigError as error:
        return str(error)
    return None


def test_a_folder_that_is_not_shared_is_refused_on_all_ranks(tmp_path):
    line = f"--output-dir {tmp_path / 'b'} is another folder on another machine: choose one that all of them share"
    assert spawn(2, write_config, [tmp_path / "a", tmp_path / "b"]) == [f"{line} (rank 1 of 2)"] * 2
    assert spawn(2, write_config, [tmp_path / "c", tmp_path / "c"]) == [None, None]
