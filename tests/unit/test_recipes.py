"""Each recipe is a configuration that can be run by its name, and the comments at its top are true."""

import json
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from fsdptrain import cli
from fsdptrain.config import Config
from fsdptrain.config.keys import all_keys
from fsdptrain.config.recipe import load_recipe
from fsdptrain.config.rules import COLUMN
from tests import configs
from tests.recipe_headers import HARDWARE, RECIPES, read_header


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_header_says_what_the_recipe_trains_how_to_run_it_and_on_what(path: Path) -> None:
    header, config = read_header(path), load_recipe(path)
    assert re.fullmatch(r"[A-Z].{20,}[^.]\.", header.summary)
    assert any(re.search(rf"(?<!\S)--recipe {re.escape(path.stem)}(?!\S)", line) for line in header.commands)
    assert HARDWARE.fullmatch(header.hardware), header.hardware
    assert header.time != ""
    model = config.model.hf_checkpoint.rpartition("/")[2].lower().replace("-", "_")
    for suffix in ("_base", "_instruct"):
        model = model.removesuffix(suffix)
    if not path.stem.startswith("spell_backward"):  # whose model the demo makes
        assert path.stem.endswith(f"_{model}"), model
        assert config.run.output_dir == f"runs/{path.stem}"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_can_be_dry_run_by_its_name(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_files_of(load_recipe(path), tmp_path)
    config = load_recipe(path)
    needs_vllm = config.rollout.engine == "vllm" and find_spec("vllm") is None
    code = cli.run(["--recipe", path.stem, "--dry-run", "full", *["--rollout-engine", "auto"] * needs_vllm])
    shown = capsys.readouterr()
    assert (code, shown.err) == (0, "")
    assert Config(**yaml.safe_load(shown.out)) == (config.with_values(rollout_engine="auto") if needs_vllm else config)


def make_files_of(config: Config, folder: Path) -> None:
    """Make the files that a recipe names and its user has to write: the demo's model, prompts."""
    if config.model.hf_checkpoint.startswith("runs/"):
        model = folder / config.model.hf_checkpoint
        model.mkdir(parents=True)
        shutil.copy(configs.CONFIGS / "qwen3-4b" / "config.json", model)
    columns = [value for key in all_keys().values() if COLUMN in key.field.metadata and (value := key.value(config))]
    path = folder / config.data.prompt_data.partition("?")[0]
    if path.suffix == ".jsonl":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dict.fromkeys(columns, "1")) + "\n")
