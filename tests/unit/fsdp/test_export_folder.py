"""An export replaces nothing but an older export, and only once it is complete."""

import shutil
from pathlib import Path

import pytest

from fsdptrain.errors import CheckpointError
from fsdptrain.fsdp.export_folder import MARKER, check_target, publish_folder, temporary_of


def export(target: Path, text: str = "new", *, inner: str = "") -> Path:
    temporary_of(target).mkdir(parents=True)
    (temporary_of(target) / "model.safetensors").write_text(text)
    publish_folder(target)
    return target if not inner else export(target / inner, text)


def test_an_older_export_is_replaced_also_behind_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "disk" / "hf", tmp_path / "link"
    link.symlink_to(target)
    target.mkdir(parents=True)  # an empty folder is as good as none
    export(export(target, "old"), inner="adapter")
    export(link, "newer")
    assert {path.name for path in target.iterdir()} == {"model.safetensors", MARKER}
    assert (target / "model.safetensors").read_text() == "newer"
    assert [path.name for path in target.parent.iterdir()] == ["hf"]


def test_what_was_added_to_an_export_is_kept(tmp_path: Path) -> None:
    target = export(tmp_path / "hf", "old")
    (target / "README.md").write_text("a card")
    (target / ".cache").mkdir()
    (target / ".cache" / "upload").write_text("half")
    export(export(target), "newer")
    assert {path.name for path in target.iterdir()} == {"model.safetensors", MARKER, "README.md", ".cache"}
    found = [(target / name).read_text() for name in ("model.safetensors", "README.md", ".cache/upload")]
    assert found == ["newer", "a card", "half"]


@pytest.mark.parametrize(
    "case",
    ["file", "below a file", "foreign", "model", "broken", "deep", "run", "source", "parent of source", ".", "/"],
)
def test_nothing_else_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    target, sources = tmp_path / "target", [None, "a/hub-id"]
    if case in ("file", "below a file"):
        target.write_text("")
        target = target / "a" / "b" if case == "below a file" else target
    elif case == "foreign":
        target.mkdir()
        (target / "model.safetensors").write_text("")
    elif case == "model":
        (export(target) / "model.safetensors.index.json").write_text("")
    elif case == "broken":
        (export(target) / MARKER).write_text("[]")
    elif case == "deep":
        (export(target, inner="adapter").parent / "adapter" / "notes").write_text("")
    elif case == "run":
        (target / "checkpoints").mkdir(parents=True)
    elif case in ("source", "parent of source"):
        export(target, inner="adapter")
        sources = [str(target / "adapter" / ("." if case == "parent of source" else ".."))]
    elif case == ".":
        export(target)
        monkeypatch.chdir(target)
    else:
        target = Path("/")
    with pytest.raises(CheckpointError) as caught:
        check_target(Path(".") if case == "." else target, flag="--output x", sources=sources)
    assert str(caught.value).startswith("--output x: the model cannot be written to ")
    assert "\n" not in str(caught.value)


def test_a_target_that_was_taken_meanwhile_is_left_alone_and_the_export_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "hf"
    (target / "notes").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=f"complete in {temporary_of(target)}.*it holds notes"):
        export(target)
    assert (temporary_of(target) / "model.safetensors").is_file()
    shutil.rmtree(target)
    publish_folder(target)
    assert (target / "model.safetensors").is_file()
