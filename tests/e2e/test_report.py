"""`fsdptrain report`: a table and a page of a run, by the real command line."""

import gzip
import json
import shutil
from pathlib import Path

from tests.e2e import command
from tests.e2e.conftest import Finished


def test_report_of_a_real_run(finished: Finished, checkpoint: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished.folder, tmp_path / "run")
    result = command.run(["report", str(run)], tmp_path)

    assert (result.code, result.err) == (0, "")
    last = command.metrics_of(run)[-2]
    table = {line.split("  ")[0]: line.split() for line in result.out.splitlines()}
    assert table["reward"][-2:] == [f"{last['reward/mean']:.3f}", "2"]
    assert "accuracy" in table
    assert f"grpo of {checkpoint}" in result.out.replace("\n", "")
    with gzip.open(run / "profile" / "rank0_step2-2.json.gz") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"phase: train", "aten::mm"} <= names
    assert "</html>" in (run / "report.html").read_text()
    both = command.run(["report", str(run), str(finished.folder)], tmp_path)
    assert all(f"{folder}: grpo of " in both.out for folder in (run, finished.folder))  # by paths: both are named run
    planned = command.run(["plan", str(run)], tmp_path)
    assert planned.code == 0, planned.err
    assert planned.out.splitlines()[-2].endswith("exports in float32")
    assert planned.out.splitlines()[-1] == f"  fsdptrain --recipe {run}/config.yaml"
    assert f"give {run}/hf" in command.run(["inspect", "--hf-checkpoint", str(run)], tmp_path).err
