"""The number of threads follows the cores of the scheduler, not of the machine."""

import os
from pathlib import Path

import pytest

from fsdptrain.cores import usable_cores


@pytest.mark.parametrize(("limit", "most"), [("max 100000", 10**6), ("150000 100000", 2), ("50000 100000", 1)])
def test_the_cpu_limit_of_any_control_group_applies(tmp_path: Path, limit: str, most: int):
    group = tmp_path / "cgroup" / "job" / "step"
    group.mkdir(parents=True)
    (group.parent / "cpu.max").write_text(f"{limit}\n")
    (group / "cpu.max").write_text("max 100000\n")
    (tmp_path / "membership").write_text("0::/job/step\n")
    assert usable_cores(tmp_path / "membership", tmp_path / "cgroup") == min(len(os.sched_getaffinity(0)), most)


def test_a_process_bound_to_one_core_has_one(tmp_path: Path):
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert usable_cores(tmp_path / "none", tmp_path) == 1
    finally:
        os.sched_setaffinity(0, before)
