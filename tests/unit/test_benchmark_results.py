"""Every file of benchmarks/results says by which command it was made, and that command is still there."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_HEADER = {
    "algorithms": "hours of runs, made before there was a header: algorithms.py writes one when they are made again",
    "staleness": "hours of runs, made before there was a header: staleness.py writes one when they are made again",
}
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_name_a_command_that_is_there(path: Path) -> None:
    report = json.loads(path.read_text())
    python, script, *_ = report["command"].split()
    assert python == "python"
    assert (ROOT / script).is_file()
    assert report["machine"]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_say_of_which_code_and_machine_they_are(path: Path) -> None:
    """As `record.header` does: commit, machine with its load before, versions."""
    if path.stem in WITHOUT_HEADER:
        pytest.skip(WITHOUT_HEADER[path.stem])
    report = json.loads(path.read_text())
    assert report["commit"].strip("+")
    assert {"python", "torch", "transformers"} <= report["versions"].keys()
    assert {"cpu", "cores", "threads", "memory_gib", "gpu"} <= report["machine"].keys()
    assert len(report["machine"]["load"]) == 3


def test_exceptions_are_files_without_a_header() -> None:
    assert {path.stem for path in RESULTS if "versions" not in json.loads(path.read_text())} == set(WITHOUT_HEADER)
