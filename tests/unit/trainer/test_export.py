"""`fsdptrain export` on a folder that may come from somebody else."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fsdptrain.errors import CheckpointError
from fsdptrain.trainer.export import export_checkpoint
from tests.testing import save_tiny_checkpoint

RECIPE = "hf_checkpoint: {model}\ntrust_remote_code: true\nreward: [foreign_code:reward]\nloss: foreign_code:loss\n"


def run_folder(folder: Path, recipe: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the checkpoint of a run with `recipe`. The folder is the current one, where plug-ins are looked for."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (folder / "config.yaml").write_text(recipe)
    checkpoint = folder / "checkpoints" / "step_00000001"
    checkpoint.mkdir(parents=True)
    return checkpoint


def test_a_foreign_run_folder_runs_no_code_without_the_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, was_run = tmp_path / "model", tmp_path / "was_run"
    model.mkdir()
    save_file({"a": torch.ones(1)}, model / "model.safetensors")
    (model / "config.json").write_text(
        json.dumps({"model_type": "foreign", "auto_map": {"AutoConfig": "foreign_code.Config"}})
    )
    code = f"open({str(was_run)!r}, 'w').close()\nraise ImportError('foreign code was run')\n"
    for folder in (model, tmp_path):
        (folder / "foreign_code.py").write_text(code)
    checkpoint = run_folder(tmp_path, RECIPE.format(model=model), monkeypatch)

    with pytest.raises(CheckpointError, match="needs the Python code that it ships"):
        export_checkpoint(checkpoint, tmp_path / "hf")
    assert not was_run.exists()
    with pytest.raises(CheckpointError, match="foreign code was run"):
        export_checkpoint(checkpoint, tmp_path / "hf", trust_remote_code=True)
    assert was_run.exists()


def test_the_optimizer_of_a_foreign_run_folder_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_tiny_checkpoint(tmp_path / "model")
    (tmp_path / "foreign_optim.py").write_text("raise ImportError('foreign code was run')\n")
    checkpoint = run_folder(tmp_path, f"hf_checkpoint: {model}\noptimizer: foreign_optim:make\n", monkeypatch)
    with pytest.raises(CheckpointError, match=r"trainer\.json"):
        export_checkpoint(checkpoint, tmp_path / "hf")
