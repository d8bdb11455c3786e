"""How the demo treats existing folders and failures. test_wheel.py runs it, and `make demo` in full size."""

from pathlib import Path

import pytest

from fsdptrain.errors import ConfigError
from fsdptrain.tools.demo import demo


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
    def fail(folder: Path, seed: int, counts: dict[str, int]) -> None:
        demo.run_command(["--no-such-flag"])

    monkeypatch.setattr(demo, "play", fail)
    assert demo.demo(["--output-dir", str(tmp_path / "x")]) == 2
