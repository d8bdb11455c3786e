"""All ranks share the folder of a run, and restarted ranks resume from its newest checkpoint."""

import json
import os
import shutil
import socket
import time
from signal import SIGKILL

import pytest
import torch.distributed as dist

from fsdptrain import platform
from fsdptrain.checkpoints import PROGRESS_FILE
from fsdptrain.commands import newest_checkpoint
from fsdptrain.config import Config, to_yaml
from fsdptrain.errors import CheckpointError, ConfigError
from fsdptrain.trainer.run_dir import open_folder
from fsdptrain.trainer.run_lock import LOCK_FILE, lock_folder
from tests.testing import preloaded_context, rank_variables, spawn


def checkpoint(folder, step):
    path = folder / f"checkpoints/step_{step:08d}"
    path.mkdir(parents=True)
    (path / PROGRESS_FILE).write_text(json.dumps({"step": step}))
    return path


@pytest.mark.parametrize(
    ("resume", "restarts", "since_start", "step"),
    [
        ("auto", 0, [], 3),
        ("never", 1, [3], 3),
        ("run/checkpoints/step_00000001", 0, [], 1),
        ("run/checkpoints/step_00000001", 0, [3], 1),
        ("run/checkpoints/step_00000001", 1, [], 1),
        ("run/checkpoints/step_00000001", 1, [3], 3),
        ("run/checkpoints/step_00000001", 1, None, 1),
        ("other/checkpoints/step_00000002", 0, [], 2),
        ("other/checkpoints/step_00000002", 1, [], 2),
        ("other/checkpoints/step_00000002", 1, [3], 3),
    ],
)
def test_resume_holds_for_the_start_and_not_for_restarts(tmp_path, monkeypatch, resume, restarts, since_start, step):
    """since_start: steps whose checkpoints are younger than config.yaml. None: the first try ended before its start."""
    run = tmp_path / "run"
    for folder, number in ((run, 1), (run, 3), (tmp_path / "other", 2)):
        checkpoint(folder, number)
    resume, tried = str(tmp_path / resume) if "/" in resume else resume, since_start is None
    (run / "config.yaml").write_text(f"hf_checkpoint: x\nresume: {'auto' if tried else resume}\n")
    start = (run / "config.yaml").stat().st_mtime
    for number in (1, 3):
        age = 60 if tried or number in since_start else -60
        os.utime(run / f"checkpoints/step_{number:08d}", (start + age, start + age))
    with platform.process_group(10):
        for name, value in {**rank_variables(0, 1, 29500), "TORCHELASTIC_RESTART_COUNT": str(restarts)}.items():
            monkeypatch.setenv(name, value)
        folder = open_folder(Config(hf_checkpoint="x", output_dir=str(run), resume=resume))
        assert folder.resumed_step == step
        folder.start(Config(hf_checkpoint="x", output_dir=str(run)), step)
    is_written = (run / "config.yaml").stat().st_mode & 0o777 == 0o600
    assert is_written == (restarts == 0 or tried)
    assert newest_checkpoint(run) == run / f"checkpoints/step_{1 if step < 3 else 3:08d}"  # fsdptrain export RUN


@pytest.fixture
def run(tmp_path):
    """A run of two rollouts: (its folder, its checkpoint, what opens it with other options)."""
    folder, options = (
        tmp_path / "run",
        {"hf_checkpoint": str(tmp_path / "a"), "prompt_data": "x.jsonl", "reward": "math"},
    )
    path = checkpoint(folder, 2)
    (folder / "config.yaml").write_text(to_yaml(Config(**options, num_rollout=4, output_dir=str(folder))))

    def reopen(**values):
        with platform.process_group(10):
            return open_folder(Config(**{**options, "num_rollout": 4, "output_dir": str(folder), **values}))

    return folder, path, reopen


@pytest.mark.parametrize(
    "values",
    [{"hf_checkpoint": "b"}, {"algorithm": "dapo"}, {"prompt_data": "y.jsonl"}, {"reward": "exact"}, {"lora_rank": 8}],
)
@pytest.mark.parametrize("num_rollout", [2, 4])
def test_another_experiment_in_a_folder_of_a_run_is_refused_unless_its_checkpoint_is_named(run, values, num_rollout):
    folder, path, reopen = run
    with pytest.raises(ConfigError) as caught:
        reopen(**values, num_rollout=num_rollout)
    [(flat, value)] = values.items()
    message = str(caught.value)
    assert f"--{flat.replace('_', '-')} {[value] if flat == 'reward' else value} in place of" in message
    assert message.startswith(f"--output-dir {folder} holds another experiment")
    assert message.endswith(f"choose another --output-dir, or go on from its checkpoint on purpose by --resume {path}")
    assert "\n" not in message
    assert reopen(**values, resume=str(path)).resumed_step == 2
    assert reopen(**values, output_dir=f"{folder}-2").resumed_step is None


def test_options_that_leave_the_experiment_are_named_in_one_line(run, caplog, tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()  # a path is compared as what it names
    harmless = {"lr": 1e-3, "num_rollout": 9, "log_to": ["wandb"], "fsdp_cpu_offload": True, "reward_workers": 0}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.jsonl").write_text("")
    same = {"hf_checkpoint": f"{tmp_path}/./a/", "prompt_data": f"{tmp_path}/./x.jsonl"}
    assert run[2](**harmless, **same).resumed_step == 2
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("resumes after step 2 with ")
    assert line.count("in place of") == len(harmless)
    with pytest.raises(ConfigError, match="would have no effect"):
        run[2](lr=1e-3, num_rollout=2)
    assert run[2](log_to=["wandb"], num_rollout=2).resumed_step == 2


def test_results_of_another_experiment_are_never_replaced(run, tmp_path):
    """Also where the checkpoint is from elsewhere, and where the other run kept only its model."""
    folder, path, reopen = run
    elsewhere = checkpoint(tmp_path / "other", 1)
    with pytest.raises(ConfigError, match=r"--lora-rank 8 in place of 0: choose another --output-dir$"):
        reopen(lora_rank=8, resume=str(elsewhere))
    shutil.rmtree(path)
    assert reopen(lora_rank=8).resumed_step is None
    (folder / "hf").mkdir()
    with pytest.raises(ConfigError, match=r"--lora-rank 8 in place of 0: choose another --output-dir$"):
        reopen(lora_rank=8)


def test_a_folder_that_the_final_export_must_not_replace_is_refused_before_training(run):
    folder, _, reopen = run
    (folder / "hf").mkdir()
    (folder / "hf" / "notes").write_text("")
    with pytest.raises(CheckpointError, match=f"--output-dir {folder}: .*it holds notes"):
        reopen()
    assert reopen(export=False).resumed_step == 2


@pytest.mark.parametrize("content", ["[]", "{}", '{"step": "2"}', '{"step": -1}', "{"])
def test_counters_that_no_run_has_written_are_refused(run, content):
    (run[1] / PROGRESS_FILE).write_text(content)
    with pytest.raises(CheckpointError, match=r"--resume: .*step_00000002"):
        run[2]()


def lock(folder, during=lambda: None):
    with lock_folder(Config(hf_checkpoint="x", output_dir=str(folder), dist_timeout=4)):
        during()


def lock_shared(folders):
    try:
        lock(folders[dist.get_rank()])
    except ConfigError as error:
        return str(error)
    return None


def test_a_folder_that_is_not_shared_is_refused_on_all_ranks(tmp_path):
    """Also where an earlier run of this name left its files on each machine."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        (folder / "config.yaml").write_text("")
        (folder / LOCK_FILE).write_text("host x, pid 1, since yesterday")
    line = f"--output-dir {folders[1]} is another folder on another machine: choose one that all of them share"
    assert spawn(2, lock_shared, folders) == [f"{line} (rank 1 of 2)"] * 2
    assert spawn(2, lock_shared, [folders[0]] * 2) == [None, None]


def hold(folder, signal):
    def wait():
        if (worker := os.fork()) != 0:
            signal.write_text(str(worker))
        time.sleep(600)

    with platform.process_group(10):
        lock(folder, wait)


def test_a_folder_has_one_run_at_a_time_and_is_free_after_a_kill(tmp_path):
    folder, signal = tmp_path / "run", tmp_path / "signal"
    process = preloaded_context().Process(target=hold, args=(folder, signal))
    process.start()
    while not (signal.exists() and signal.read_text()):
        assert process.is_alive()
        time.sleep(0.01)
    try:
        with platform.process_group(10):
            holder = rf"\(host {socket.gethostname()}, pid {process.pid}, since 2.*\)"
            with pytest.raises(ConfigError, match=f"--output-dir {folder} is in use by another run {holder}: wait"):
                lock(folder)
            process.kill()
            process.join()
            lock(folder)
    finally:
        process.kill()
        os.kill(int(signal.read_text()), SIGKILL)  # outlives the run
    assert not folder.exists(), "a run that wrote nothing leaves nothing"
