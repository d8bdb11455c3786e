"""How the demo treats existing folders, failures and models. test_wheel.py runs it, and `make demo` in full size."""

import json
from pathlib import Path

import pytest

from fsdptrain.config import DataConfig
from fsdptrain.data.sources import load_rows
from fsdptrain.errors import ConfigError
from fsdptrain.tools.demo import demo
from fsdptrain.tools.demo.model import save_start
from fsdptrain.tools.demo.sums import last_number, write_sums
from fsdptrain.types import Prompt


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("ten years")
    with pytest.raises(ConfigError, match=f"--output-dir {tmp_path} is not a demo folder: choose a new folder, or del"):
        demo.demo(["--output-dir", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_former_demo_is_replaced_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "quickstart"
    demo.clear(folder)
    assert capsys.readouterr().out == ""
    (folder / "summary.json").write_text("{}")
    demo.clear(folder)
    assert capsys.readouterr().out.startswith(f"Replacing the demo in {folder}")
    assert not (folder / "summary.json").exists()


def test_a_command_that_fails_ends_the_demo_with_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path, **values: object) -> None:
        demo.run_command(["--no-such-flag"])

    monkeypatch.setattr(demo, "play", fail)
    assert demo.demo(["--output-dir", str(tmp_path / "x")]) == 2


def test_a_model_of_ones_own_learns_sums_whose_last_number_counts(tmp_path: Path) -> None:
    write_sums(tmp_path / "sums.jsonl")
    rows = load_rows(DataConfig(prompt_data=str(tmp_path / "sums.jsonl")), seed=0)
    assert len({str(row.prompt) for row in rows}) == 100
    [row] = [row for row in rows if row.prompt == "What is 3 + 4? Reply with only the number."]
    prompt = Prompt(row.id, [], "", row.label)
    responses = ["7", "3 + 4 = 7.", "The sum of 3 and 4 is 7", "7 is 3 + 4", "17", "seven", ""]
    assert [last_number(prompt, response) for response in responses] == [1, 1, 1, 0, 0, 0, 0]
    with pytest.raises(ConfigError, match="--warm-up-steps: --model is trained without a warm-up"):
        demo.demo(["--model", "x", "--warm-up-steps", "30"])


@pytest.mark.matrix
def test_a_model_of_ones_own_is_trained(tmp_path: Path) -> None:
    save_start(tmp_path / "model", seed=0, words=["What is ", "? Reply with only the number."])
    assert demo.demo(["--model", str(tmp_path / "model"), "--rollouts", "1", "--output-dir", str(tmp_path / "x")]) == 0
    assert json.loads((tmp_path / "x" / "summary.json").read_text()).keys() >= {"accuracy_before", "greedy_after"}
    assert (tmp_path / "x" / "grpo" / "report.html").is_file()
