"""Loggers of a run; those of packages without a network."""

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path

import pytest

from fsdptrain.config import Config, LogConfig
from fsdptrain.config.keys import all_keys
from fsdptrain.loggers import build_loggers
from fsdptrain.loggers.console import ConsoleLogger
from fsdptrain.loggers.dashboards import _is_closed, shared_options
from fsdptrain.loggers.jsonl import JsonlLogger

TEXTS = [
    *("prompt_data", "system_prompt", "input_key", "label_key", "ref_load", "environment_key"),
    *("environment_command", "weight_sync_dir", "megatron_spec", "rollout_server_python", "image_key", "opd_teacher"),
    *("hf_checkpoint", "output_dir", "resume", "profile_steps", "reward_key", "stop_when", "eval_metric", "lora_init"),
    "replay_rollouts",
]
LISTS, DICTS = (
    [
        *("reward", "lora_targets", "rollout_urls", "rollout_stop", "eval_prompt_data", "freeze"),
        *("lora_modules_to_save", "environment"),
    ],
    ["chat_template_kwargs", "environment_kwargs", "rollout_engine_args", "eval_set_options", "lr_scale"],
)
SECRETS = {name: f"/home/me/sk-{number:02d}-secret" for number, name in enumerate([*TEXTS, *LISTS, *DICTS])}

PROGRAM = """
import sys
from copy import deepcopy
from pathlib import Path
from fsdptrain.config import LogConfig, Config
from fsdptrain.loggers import build_loggers

def planted():
    from tests.unit.loggers.test_loggers import planted
    return planted()

config = planted()
name, folder, resumed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
loggers = build_loggers(
    LogConfig(to=[name], project="proj"), folder, total_steps=4,
    resumed_step=resumed or None, config=config,
)
for step in range(resumed + 1, resumed + 3):
    for logger in loggers:
        logger.log({"reward/mean": step / 10, "optim/grad_norm": float("inf")}, step)
        sample = {"set": "train", "response": "r", "label": step, "reward": 1.0, "tokens": ["r"]}
        logger.log_samples([sample | {"error": config.environment.environment_kwargs["url"]}], step)
for logger in loggers:
    logger.close()
"""


def planted() -> Config:
    """A configuration with a secret in every option that takes text, a list or a mapping; no rule has seen it."""
    config = deepcopy(Config(hf_checkpoint="x"))
    values = {name: SECRETS[name] for name in TEXTS} | {name: [SECRETS[name]] for name in LISTS}
    values |= {name: {"api_key": SECRETS[name], "url": f"http://user:{SECRETS[name]}@host"} for name in DICTS}
    for name, value in values.items():
        key = all_keys()[name]
        object.__setattr__(config.named(key.section), key.name, value)
    return config


def require_no_secret(folder: Path) -> None:
    """Nothing that was written holds a secret, the command line, or a path of this machine."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".log"]  # logs stay here
    assert files
    assert not [path for path in files if path.name == "requirements.txt"]
    for path in files:
        content = path.read_bytes()
        for word in (*SECRETS.values(), "sys.argv", "program.py", str(folder), str(Path(__file__).parents[3])):
            assert word.encode() not in content, (path, word)


def test_every_option_that_takes_text_is_planted_or_allowed() -> None:
    free = {name for name, key in all_keys().items() if not _is_closed(key.field.annotation)}
    allowed = {"loss", "advantage_estimator", "optimizer", "rollout_engine"}  # a name without dots
    not_sent = {"push_to_hub", "log_to", "log_project", "log_run_name"}  # where it is sent, and its name there
    assert free == {*SECRETS} | allowed | not_sent
    shared = shared_options(planted())
    assert not set(shared) & {*SECRETS, *not_sent}
    assert shared["lr"] == 1e-6
    assert shared_options(Config(hf_checkpoint="Qwen/Qwen3-4B"))["hf_checkpoint"] == "Qwen/Qwen3-4B"
    assert "loss" not in shared_options(Config(hf_checkpoint="x", loss="my_secret.module:loss"))


class ListLogger:
    """A logger of a user."""

    def __init__(self, info):
        self.info = info


def log_for_real(name, folder, *, resumed=0):
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_HOST": SECRETS["resume"], "PYTHONPATH": os.getcwd()}
    environment["WANDB_SAVE_CODE"] = "true"
    environment.pop("TRACKIO_DIR", None)
    environment.pop("MLFLOW_TRACKING_URI", None)
    folder.mkdir(exist_ok=True)
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(folder / "program.py"), name, str(folder), str(resumed)]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=True, timeout=120)


def test_jsonl_is_always_used(tmp_path):
    loggers = build_loggers(LogConfig(to=[]), tmp_path, total_steps=1)
    assert [type(logger) for logger in loggers] == [JsonlLogger]
    loggers[0].close()


def test_only_rank_0_logs(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert build_loggers(LogConfig(), tmp_path, total_steps=1) == []


def test_a_custom_logger_gets_the_run_info(tmp_path):
    log = LogConfig(to=["console", "tests.unit.loggers.test_loggers:ListLogger"], project="p")
    jsonl, console, own = build_loggers(log, tmp_path / "run-a", total_steps=7)
    assert isinstance(console, ConsoleLogger)
    assert (own.info.project, own.info.run_name, own.info.total_steps) == ("p", "run-a", 7)
    jsonl.close()


@pytest.mark.matrix
def test_runs_of_one_folder_share_a_trackio_database_with_metrics_and_samples(tmp_path):
    shown = log_for_real("trackio", tmp_path / "first")
    log_for_real("trackio", tmp_path / "second")
    log_for_real("trackio", tmp_path / "first", resumed=2)
    assert shown.stdout == ""
    with sqlite3.connect(tmp_path / "trackio" / "proj.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by run_name, step, id").fetchall()
    database.close()
    metrics = [(name, step) for name, step, values in rows if b'"reward/mean"' in values]
    assert metrics == [("first", 1), ("first", 2), ("first", 3), ("first", 4), ("second", 1), ("second", 2)]
    samples = [json.loads(values)["samples/train"] for _, _, values in rows if b"samples/train" in values]
    assert len(samples) == len(metrics)
    require_no_secret(tmp_path / "trackio")
    assert samples[0]["_type"] == "trackio.table"
    assert samples[0]["_value"] == [{"set": "train", "response": "r", "label": 1, "reward": 1.0}]


@pytest.mark.matrix
def test_wandb_writes_offline_and_a_resumed_run_keeps_its_id(tmp_path):
    shown = log_for_real("wandb", tmp_path)
    log_for_real("wandb", tmp_path, resumed=2)
    assert shown.stdout == ""
    tables = list((tmp_path / "wandb").glob("offline-run-*/files/media/table/samples/train_*.table.json"))
    assert len(tables) == 4
    table = json.loads(tables[0].read_text())
    assert table["columns"] == ["set", "response", "label", "reward"]
    assert [row[:2] + row[3:] for row in table["data"]] == [["train", "r", 1.0]]
    require_no_secret(tmp_path / "wandb")
    runs = list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(runs) == 2
    assert {path.stem.removeprefix("run-") for path in runs} == {(tmp_path / "wandb_run_id").read_text()}


@pytest.mark.matrix
def test_tensorboard_shows_each_step_of_a_resumed_run_once(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    shown = log_for_real("tensorboard", tmp_path)
    log_for_real("tensorboard", tmp_path, resumed=1)
    assert shown.stdout == ""
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["reward/mean"]  # no infinite one
    assert [event.step for event in events.Scalars("reward/mean")] == [1, 2, 3]
    text = events.Tensors("samples/train/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text == "    set: train\n    response: r\n    label: 1\n    reward: 1.0"
    require_no_secret(tmp_path / "tensorboard")


@pytest.mark.matrix
@pytest.mark.skipif(find_spec("mlflow") is None, reason="the extra mlflow is not installed")
def test_a_resumed_run_is_the_same_one_of_an_mlflow_database(tmp_path):
    shown = log_for_real("mlflow", tmp_path / "first")
    log_for_real("mlflow", tmp_path / "second")
    log_for_real("mlflow", tmp_path / "first", resumed=2)
    assert shown.stdout == ""
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        runs = database.execute("select name, status, run_uuid from runs order by start_time").fetchall()
        metrics = database.execute("select step from metrics where run_uuid = ? order by 1", runs[0][2:]).fetchall()
        params = database.execute("select key, value from params where run_uuid = ?", runs[0][2:]).fetchall()
    assert [run[:2] for run in runs] == [("first", "FINISHED"), ("second", "FINISHED")]
    assert metrics == [(1,), (2,), (3,), (4,)]  # one finite metric each
    assert dict(params) == {name: str(value) for name, value in shared_options(planted()).items()}
    [table] = (tmp_path / "mlflow").rglob(f"{runs[0][2]}/artifacts/samples/train/00000003.csv")
    assert table.read_text() == "set,response,label,reward\ntrain,r,3,1.0\n"
    assert not any(secret.encode() in (tmp_path / "mlflow.db").read_bytes() for secret in SECRETS.values())
    (tmp_path / "first" / "mlflow_run_id").write_text("0" * 32)
    with pytest.raises(subprocess.CalledProcessError) as failed:
        log_for_real("mlflow", tmp_path / "first", resumed=2)
    assert "; check MLFLOW_TRACKING_URI, or remove " in failed.value.stderr
