"""The report of a run folder, also of a running run and of one without a reward."""

import json
from pathlib import Path

import pytest

from fsdptrain.errors import ConfigError
from fsdptrain.tools.report.curves import draw_curves, make_figure, short, smooth
from fsdptrain.tools.report.report import report_rows, title
from fsdptrain.tools.report.timeline import read_bars

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


def test_a_run_without_a_reward_reports_its_lowest_loss(tmp_path):
    losses = [{"step": step, "loss/total": loss} for step, loss in enumerate((4.0, 0.5, 1.0), start=1)]
    (row,) = report_rows(write(tmp_path, losses))
    assert (row.label, row.best) == ("loss", (2, 0.5))


def test_a_run_with_selection_reports_all_groups_and_the_kept_share(tmp_path):
    steps = [{**row, "selection/reward_mean": 0.1, "selection/kept_fraction": 0.5} for row in GRPO[1:3]]
    steps[-1] |= {"selection/reward_mean": 0.9}
    run = write(tmp_path, steps)
    rows = {row.label: row for row in report_rows(run)}
    assert rows["reward"].last == (2, 0.875)
    assert rows["reward, including dropped groups"].best == (2, 0.9)
    assert rows["share of groups kept"].best is None
    figure = make_figure(run)
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "Reward of the rollouts",
        "Length of a completion [tokens]",
        "Share of groups kept",
    ]
    assert list(figure.axes[0].lines[0].get_ydata()) == [0.1, 0.9]


def test_an_unfinished_line_is_ignored(tmp_path):
    run = write(tmp_path, GRPO)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "reward/me')
    assert report_rows(run)[0].last == (4, 0.75)


@pytest.mark.parametrize("rows", [None, []])
def test_a_folder_without_steps_is_one_line(tmp_path, rows):
    if rows is not None:
        write(tmp_path, rows)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl"):
        report_rows(tmp_path)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl"):
        make_figure(tmp_path)


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
        ("timeline.jsonl", '{"step": 1}\n'),
        ("timeline.jsonl", '{"step": 1, "stage": [], "rollout": 1, "begin": 0, "end": 1}\n'),
        ("timeline.jsonl", '{"step": 1, "stage": "train", "rollout": "1", "begin": 0, "end": 1}\n'),
    ],
)
def test_a_broken_file_of_a_run_is_one_line_with_its_name(tmp_path, name, content):
    run = write(tmp_path, GRPO)
    (run / name).write_text(content, errors="surrogateescape")
    with pytest.raises(ConfigError, match=name) as caught:
        make_figure(run)
        read_bars(run)
    assert "\n" not in str(caught.value)


def test_the_figure_has_a_title_and_changes(tmp_path):
    run = write(tmp_path, GRPO)
    (run / "config.yaml").write_text(
        "algorithm: {algorithm: grpo}\nmodel: {hf_checkpoint: Qwen/Qwen3-4B}\ndata: {prompt_data: rows.jsonl}\n"
    )
    figure = make_figure(run)
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert figure.get_suptitle() == title(run) == "grpo of Qwen/Qwen3-4B on rows.jsonl"
    assert len(figure.axes) == 3
    assert "sampled 0.25 → 0.625" in texts
    assert "greedy 0.5 → 0.996" in texts
    assert {axes.get_xlim() for axes in figure.axes} == {(-0.03 * 4, 1.03 * 4)}
    assert all(axes.get_ylim()[0] == 0 for axes in figure.axes)


def test_the_figure_of_a_supervised_run_is_its_loss(tmp_path):
    run = write(tmp_path, [{"step": 1, "loss/total": 4.0}, {"step": 2, "loss/total": 0.5}])
    assert [axes.get_title(loc="left") for axes in make_figure(run).axes] == ["Loss"]
    assert draw_curves(run, tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_figure_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="cannot be written"):
        draw_curves(write(tmp_path, GRPO), tmp_path / "nowhere" / "curves.png")


def test_smoothing_uses_past_values_only():
    assert smooth([0.0, 2.0, 4.0, 6.0], window=2) == [0.0, 1.0, 3.0, 5.0]


@pytest.mark.parametrize(("value", "text"), [(0.996, "0.996"), (18.62, "18.6"), (0.25, "0.25")])
def test_numbers_are_short_and_not_rounded_to_one(value, text):
    assert short(value) == text
