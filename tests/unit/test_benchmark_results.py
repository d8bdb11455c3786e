"""Every file of benchmarks/results says by which command it was made, and that command is still there."""

import json
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_HEADER = {"algorithms", "staleness"}  # hours of runs, made before there was a header: made again they have one
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_name_a_command_that_is_there(path: Path) -> None:
    report = json.loads(path.read_text())
    python, script, *_ = shlex.split(report["command"])
    assert python == "python"
    assert (ROOT / script).is_file()
    assert report["machine"]


@pytest.mark.parametrize("path", [p for p in RESULTS if p.stem not in WITHOUT_HEADER], ids=lambda path: path.stem)
def test_results_say_of_which_code_and_machine_they_are(path: Path) -> None:
    """As `record.header` does: commit, machine with its load before, versions."""
    report = json.loads(path.read_text())
    assert report["commit"].strip("+")
    assert {"python", "torch", "transformers"} <= report["versions"].keys()
    assert {"cpu", "cores", "threads", "memory_gib", "gpu"} <= report["machine"].keys()
    assert len(report["machine"]["load"]) == 3


def test_exceptions_are_files_without_a_header() -> None:
    assert {path.stem for path in RESULTS if "versions" not in json.loads(path.read_text())} == WITHOUT_HEADER
