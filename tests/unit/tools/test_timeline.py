"""The figure of a timeline has every stage of the requested rollouts, without overlaps."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdptrain.errors import ConfigError
from fsdptrain.tools.report.timeline import draw_timeline, in_lanes, read_bars

span = st.tuples(st.sampled_from(["generate", "train"]), st.integers(1, 9), st.integers(0, 50), st.integers(0, 9)).map(
    lambda row: (row[0], row[1], float(row[2]), float(row[2] + row[3]))
)


@given(spans=st.lists(span, max_size=12))
def test_bars_of_a_lane_never_overlap(spans):
    bars = in_lanes(spans)
    assert sorted((b.stage, b.rollout, b.begin, b.end) for b in bars) == sorted(spans)
    for a in bars:
        for b in bars:
            if a is not b and (a.stage, a.lane) == (b.stage, b.lane):
                assert a.end <= b.begin or b.end <= a.begin


def write(folder: Path) -> None:
    rows = [
        {"step": rollout, "stage": stage, "rollout": rollout, "begin": 100.0 + rollout + begin, "end": 101.0 + rollout}
        for rollout in range(1, 9)
        for stage, begin in (("generate", 0.0), ("train", 0.5))
    ]
    (folder / "timeline.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 9, "sta')


def test_a_range_of_rollouts_of_a_running_run_is_drawn(tmp_path: Path) -> None:
    write(tmp_path)
    assert {bar.rollout for bar in read_bars(tmp_path, (3, 5))} == {3, 4, 5}
    assert {bar.rollout for bar in read_bars(tmp_path)} == {5, 6, 7, 8}
    assert min(bar.begin for bar in read_bars(tmp_path)) == 0
    assert draw_timeline(tmp_path, tmp_path / "t.svg", (3, 5)).read_text().count("rollout") >= 3


def test_missing_rollouts_and_missing_timelines_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no timeline\.jsonl"):
        read_bars(tmp_path)
    write(tmp_path)
    with pytest.raises(ConfigError, match=r"--rollouts 20:30: .* holds 1:8"):
        read_bars(tmp_path, (20, 30))
