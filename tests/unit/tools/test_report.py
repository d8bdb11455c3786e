"""The report of a run folder, also of a running run and of one without a reward."""

from pathlib import Path

import pytest

from fsdptrain.errors import ConfigError
from fsdptrain.tools.report.report import print_report
from fsdptrain.tools.report.report import report_rows as rows_of
from fsdptrain.tools.watch.run_data import RunData
from tests.testing import write_rows

GRPO = [
    {"step": 0, "eval/heldout/accuracy": 0.25, "eval/heldout_greedy/accuracy": 0.5},
    {"step": 1, "reward/mean": 0.25, "loss/total": -0.5, "completion/length_mean": 12.0},
    {"step": 2, "reward/mean": 0.875, "loss/total": 0.5, "completion/length_mean": 14.0},
    {"step": 3, "reward/mean": None, "completion/length_mean": 16.0},
    {"step": 4, "reward/mean": 0.75, "completion/length_mean": 15.0},
    {"step": 4, "eval/heldout/accuracy": 0.625, "eval/heldout_greedy/accuracy": 0.996},
]


def write(folder: Path, rows: list[dict]) -> Path:
    folder.mkdir(exist_ok=True)
    write_rows(folder / "metrics.jsonl", rows)
    return folder


def read(folder: Path) -> RunData:
    run = RunData(folder, "a")
    run.poll()
    return run


def report_rows(folder: Path):
    return rows_of(read(folder).curves)


def test_rows_have_first_best_and_last_values(tmp_path):
    rows = {row.label: (row.first, row.best, row.last) for row in report_rows(write(tmp_path, GRPO))}
    assert rows == {
        "reward": ((1, 0.25), (2, 0.875), (4, 0.75)),
        "accuracy": ((0, 0.25), (4, 0.625), (4, 0.625)),
        "accuracy, greedy": ((0, 0.5), (4, 0.996), (4, 0.996)),
        "length [tokens]": ((1, 12.0), None, (4, 15.0)),
    }


def test_a_supervised_run_has_both_losses(tmp_path):
    rows = report_rows(write(tmp_path, [{"step": 1, "loss/total": 2.0, "eval/loss": 3.0, "eval/b/loss": 4.0}]))
    expected = [("loss", (1, 2.0)), ("loss of held-out rows", (1, 3.0)), ("loss, b", (1, 4.0))]
    assert [(row.label, row.last) for row in rows] == expected


@pytest.mark.parametrize("rows", [None, []])
def test_a_folder_without_steps_is_one_line(tmp_path, rows):
    if rows is not None:
        write(tmp_path, rows)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl has no step"):
        print_report(read(tmp_path), tmp_path)


@pytest.mark.parametrize("content", ["algorithm: [", "[algorithm]", "algorithm: grpo", "\udcff", None])
def test_the_title_names_algorithm_model_and_data(tmp_path, content):
    run = write(tmp_path / "a", GRPO)
    whole = "algorithm: {algorithm: grpo}\nmodel: {hf_checkpoint: m}\ndata: {prompt_data: x}\nrun: {num_rollout: 3}\n"
    (run / "config.yaml").write_text(whole if content is None else content, errors="surrogateescape")
    assert read(run).title == ("grpo of m on x" if content is None else "a")
