"""Every line is JSON, and every step is logged once, also after a resume."""

import json
import resource

import numpy as np
import pytest
import torch

from fsdptrain.errors import ConfigError
from fsdptrain.loggers import RunInfo
from fsdptrain.loggers.jsonl import JsonlLogger


def logger(folder, resumed_step=None):
    return JsonlLogger(RunInfo(folder, "p", "n", 10, resumed_step))


def records(path):
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def log_steps(folder, steps, x, resumed_step=None):
    log = logger(folder, resumed_step)
    for step in steps:
        log.log({"x": x}, step)
        log.log_samples([{"n": 1}, {"n": 2}], step)
        assert records(folder / "metrics.jsonl")[-1]["step"] == step  # before the logger is closed
    log.close()


def test_nan_and_inf_are_null(tmp_path):
    log = logger(tmp_path)
    log.log({"optim/grad_norm": float("inf"), "x": float("nan")}, 1)
    log.log_samples([{"text": "é\n", "rewards": {"math": float("nan")}, "scores": [1.0, float("inf")]}], 1)
    log.close()
    assert records(tmp_path / "metrics.jsonl")[0]["optim/grad_norm"] is None
    assert records(tmp_path / "samples.jsonl") == [
        {"step": 1, "text": "é\n", "rewards": {"math": None}, "scores": [1.0, None]}
    ]


def test_numbers_of_other_packages_are_numbers(tmp_path):
    log = logger(tmp_path)
    log.log({"a": np.float32(1.5), "b": torch.tensor(2), "c": np.float32("nan"), "d": [np.int64(3)]}, 1)
    log.close()
    record = records(tmp_path / "metrics.jsonl")[0]
    assert [record[name] for name in "abcd"] == [1.5, 2, None, [3]]


def test_a_resumed_run_has_each_step_once(tmp_path, caplog):
    log_steps(tmp_path, range(6), 1.0)
    (tmp_path / "samples.jsonl").chmod(0o644)  # of an older version
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "x"')  # cut short by a kill
    log_steps(tmp_path, range(4, 8), 2.0, resumed_step=3)
    assert "metrics.jsonl: dropped what is no record, in line 7" in caplog.text
    found = [(r["step"], r["x"]) for r in records(tmp_path / "metrics.jsonl")]
    assert found == [(s, 1.0 if s <= 3 else 2.0) for s in range(8)]
    assert [r["step"] for r in records(tmp_path / "samples.jsonl")] == [s for s in range(8) for _ in range(2)]
    assert (tmp_path / "samples.jsonl").stat().st_mode & 0o777 == 0o600


def test_a_broken_line_is_dropped_on_resume_and_named(tmp_path, caplog):
    log_steps(tmp_path, range(2), 1.0)
    whole = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(whole.replace("\n", "\n\0\0\n" + "[" * 9000 + "\n[]\n", 1))
    log_steps(tmp_path, [2], 1.0, resumed_step=1)
    assert [r["step"] for r in records(tmp_path / "metrics.jsonl")] == [0, 1, 2]
    assert "metrics.jsonl: dropped what is no record, in line 2, 3, 4" in caplog.text


def test_a_new_run_begins_with_empty_files_and_keeps_those_of_an_earlier_one(tmp_path):
    log_steps(tmp_path, [1], 1.0)
    log_steps(tmp_path, [1], 2.0)
    assert [r["x"] for r in records(tmp_path / "metrics.jsonl.old")] == [1.0]
    assert [r["x"] for r in records(tmp_path / "metrics.jsonl")] == [2.0]


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^--output-dir .*file/run cannot be written: Not a directory"):
        logger(tmp_path / "file" / "run")


def test_a_full_disk_is_one_line(tmp_path):
    log = logger(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(ConfigError, match=r"^--output-dir .* cannot be written: File too large; .* checkpoint$"):
            log.log({"x" * 200: 1.0}, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    log.close()
