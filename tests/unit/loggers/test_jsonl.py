"""Every line is JSON, every step is there once, also after a resume."""

import json
import resource

import pytest

from fsdptrain.errors import ConfigError
from fsdptrain.loggers.jsonl import JsonlLogger
from fsdptrain.loggers.run_info import RunInfo


def logger(folder, resumed_step=None):
    return JsonlLogger(RunInfo(folder, "p", "n", 10, resumed_step))


def records(path):
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def test_a_line_is_in_the_file_before_the_logger_is_closed(tmp_path):
    log = logger(tmp_path)
    log.log({"reward/mean": 0.5}, 1)
    assert [(r["step"], r["reward/mean"]) for r in records(tmp_path / "metrics.jsonl")] == [(1, 0.5)]
    log.close()


def test_what_json_cannot_say_is_null(tmp_path):
    log = logger(tmp_path)
    log.log({"optim/grad_norm": float("inf"), "x": float("nan")}, 1)
    log.log_samples([{"text": "é\n", "rewards": {"math": float("nan")}, "scores": [1.0, float("inf")]}], 1)
    log.close()
    assert records(tmp_path / "metrics.jsonl")[0]["optim/grad_norm"] is None
    assert records(tmp_path / "samples.jsonl") == [
        {"step": 1, "text": "é\n", "rewards": {"math": None}, "scores": [1.0, None]}
    ]


def test_a_resumed_run_has_each_step_once(tmp_path):
    log = logger(tmp_path)
    for step in range(6):
        log.log({"x": 1.0}, step)
        log.log_samples([{"n": 1}, {"n": 2}], step)
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "x"')  # cut short by a kill
    log = logger(tmp_path, resumed_step=3)
    for step in range(4, 8):
        log.log({"x": 2.0}, step)
    log.close()
    assert [(r["step"], r["x"]) for r in records(tmp_path / "metrics.jsonl")] == [
        (s, 1.0 if s <= 3 else 2.0) for s in range(8)
    ]
    assert [r["step"] for r in records(tmp_path / "samples.jsonl")] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_new_run_begins_with_empty_files(tmp_path):
    for _ in range(2):
        log = logger(tmp_path)
        log.log({"x": 1.0}, 1)
        log.close()
    assert len(records(tmp_path / "metrics.jsonl")) == 1


def test_a_run_that_fails_before_it_has_begun_loses_nothing(tmp_path):
    log = logger(tmp_path)
    for step in range(3):
        log.log({"x": 1.0}, step)
    log.close()
    for resumed_step in (1, None):
        logger(tmp_path, resumed_step).close()
        assert [r["step"] for r in records(tmp_path / "metrics.jsonl")] == [0, 1, 2]


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


def test_a_run_that_begins_anew_keeps_what_an_earlier_one_logged(tmp_path):
    first = logger(tmp_path)
    first.log({"loss": 1.0}, 1)
    first.close()

    second = logger(tmp_path)
    second.log({"loss": 2.0}, 1)
    second.close()

    assert json.loads((tmp_path / "metrics.jsonl.old").read_text())["loss"] == 1.0
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] == 2.0
