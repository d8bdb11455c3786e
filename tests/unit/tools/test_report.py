"""The report of a run folder, also of a running run and of one without a reward."""

import json
from pathlib import Path

import pytest

from fsdptrain.errors import ConfigError
from fsdptrain.tools.report.report import print_report, report_rows

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
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_rows_have_first_best_and_last_values(tmp_path):
    rows = {row.label: (row.first, row.best, row.last) for row in report_rows(write(tmp_path, GRPO))}
    assert rows == {
        "reward": ((1, 0.25), (2, 0.875), (4, 0.75)),
        "accuracy": ((0, 0.25), (4, 0.625), (4, 0.625)),
        "accuracy, greedy": ((0, 0.5), (4, 0.996), (4, 0.996)),
        "length [tokens]": ((1, 12.0), None, (4, 15.0)),
    }


@pytest.mark.parametrize("rows", [None, []])
def test_a_folder_without_steps_is_one_line(tmp_path, rows):
    if rows is not None:
        write(tmp_path, rows)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl"):
        report_rows(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics.jsonl", '{"step": NaN, "reward/mean": 1}\n'),
        ("metrics.jsonl", '{"step": "1", "reward/mean": 1}\n'),
        ("metrics.jsonl", '{"step": 1, "reward/mean": "high"}\n'),
        ("metrics.jsonl", '{"step": 1, "reward/mean": [1]}\n'),
        ("metrics.jsonl", "[" * 9000 + "\n"),
        ("config.yaml", "algorithm: ["),
        ("config.yaml", "[algorithm]"),
        ("config.yaml", "algorithm: grpo"),
        ("config.yaml", "\udcff"),
    ],
)
def test_a_broken_file_of_a_run_is_one_line_with_its_name(tmp_path, name, content):
    run = write(tmp_path, GRPO)
    (run / name).write_text(content, errors="surrogateescape")
    with pytest.raises(ConfigError, match=name) as caught:
        print_report(run)
    assert "\n" not in str(caught.value)
