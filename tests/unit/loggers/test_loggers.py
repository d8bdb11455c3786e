"""Loggers of a run; wandb and trackio without a network."""

import json
import os
import sqlite3
import subprocess
import sys

import pytest

from fsdptrain.config import LogConfig
from fsdptrain.errors import ConfigError
from fsdptrain.loggers import build_loggers
from fsdptrain.loggers.console import ConsoleLogger
from fsdptrain.loggers.jsonl import JsonlLogger

PROGRAM = """
import sys
from pathlib import Path
from fsdptrain.config import LogConfig, Config
from fsdptrain.loggers import build_loggers
name, folder, resumed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
loggers = build_loggers(
    LogConfig(to=[name], project="proj"), folder, total_steps=4,
    resumed_step=resumed or None, config=Config(hf_checkpoint="x"),
)
for step in range(resumed + 1, resumed + 3):
    for logger in loggers:
        logger.log({"reward/mean": step / 10, "optim/grad_norm": float("inf")}, step)
        logger.log_samples([{"set": "train", "response": "r", "label": step, "reward": 1.0, "tokens": ["r"]}], step)
for logger in loggers:
    logger.close()
"""


class ListLogger:
    """A logger of a user."""

    def __init__(self, info):
        self.info = info


def log_for_real(name, folder, *, resumed=0):
    environment = {**os.environ, "WANDB_MODE": "offline", "PYTHONPATH": os.getcwd()}
    environment.pop("TRACKIO_DIR", None)
    command = [sys.executable, "-c", PROGRAM, name, str(folder), str(resumed)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)


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


def test_an_unknown_logger_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="--log-to does not know 'wand'; did you mean 'wandb'"):
        build_loggers(LogConfig(to=["wand"]), tmp_path, total_steps=1)


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
    runs = list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(runs) == 2
    assert {path.stem.removeprefix("run-") for path in runs} == {(tmp_path / "wandb_run_id").read_text()}
