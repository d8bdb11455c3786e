"""All ranks share the folder of a run, and restarted ranks resume from its newest checkpoint."""

import json

import pytest
import torch.distributed as dist

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.errors import ConfigError
from fsdptrain.trainer.run_dir import PROGRESS_FILE, RunFolder, open_folder
from tests.testing import spawn


def checkpoint(folder, step, run_id):
    path = folder / f"checkpoints/step_{step:08d}"
    path.mkdir(parents=True)
    (path / PROGRESS_FILE).write_text(json.dumps({"step": step, "TORCHELASTIC_RUN_ID": run_id}))
    return path


@pytest.mark.parametrize(
    ("resume", "run_id", "restarts", "step"),
    [
        ("auto", "another", 0, 3),
        ("never", "another", 1, 3),
        ("checkpoints/step_00000001", "ours", 0, 1),
        ("checkpoints/step_00000001", "ours", 1, 3),
        ("checkpoints/step_00000001", "another", 1, 1),  # step 3 is from before the run went back to 1
    ],
)
def test_resume_holds_for_the_start_and_not_for_restarts(tmp_path, monkeypatch, resume, run_id, restarts, step):
    for number in (1, 3):
        checkpoint(tmp_path, number, "ours")
    (tmp_path / "config.yaml").write_text("hf_checkpoint: x\n")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
    resume = str(tmp_path / resume) if "/" in resume else resume
    with platform.process_group(10):
        folder = open_folder(Config(hf_checkpoint="x", output_dir=str(tmp_path), resume=resume))
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
