"""Every file of benchmarks/results says by which command it was made, and that command is still there."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_name_a_command_that_is_there(path: Path) -> None:
    report = json.loads(path.read_text())
    python, script, *_ = report["command"].split()
    assert python == "python"
    assert (ROOT / script).is_file()
    assert report["machine"]
