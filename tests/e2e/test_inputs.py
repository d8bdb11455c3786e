"""A resumed run has the inputs of its checkpoint, or says which it has not."""

import importlib
import sys
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fsdptrain import Config, Trainer
from fsdptrain.config import DataConfig
from fsdptrain.data.rows import Row
from fsdptrain.data.tables import as_rows
from fsdptrain.errors import CheckpointError
from fsdptrain.trainer.export import export_checkpoint
from fsdptrain.trainer.inputs import MODEL, digest_rows, held_out_content, source_of
from fsdptrain.trainer.samples.environment import Agent
from fsdptrain.types import Images, Prompt
from tests.testing import save_tiny_checkpoint, tiny_run, write_rows

ROWS = [{"prompt": f"say {i}", "label": str(i)} for i in range(40)]
CODE = {
    "my_inputs_reward.py": "from my_inputs_helper import N\n\ndef right(prompt, text):\n    return len(text) % N\n",
    "my_inputs_helper.py": "N = 3\n",
    "my_inputs_game.py": "from fsdptrain.types import Turn\n\nclass Game:\n    def reset(self, prompt, seed):\n"
    "        return 0\n\n    def step(self, state, response):\n        return Turn(done=True)\n",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run with a checkpoint, and of its inputs."""
    folder = tmp_path_factory.mktemp("bound")
    write(folder)
    Trainer(config(folder, num_rollout=1)).fit()
    return folder


def write(folder: Path) -> None:
    for model in ("model", "reference"):
        save_tiny_checkpoint(folder / model)
    (folder / "model" / "preprocessor_config.json").write_text("{}")
    write_rows(folder / "rows.jsonl", ROWS)
    for name, text in CODE.items():
        (folder / name).write_text(text)
        sys.modules.pop(name.removesuffix(".py"), None)
    sys.path[:] = [str(folder), *(path for path in sys.path if path != str(folder))]
    importlib.invalidate_caches()


def config(folder: Path, **values: Any) -> Config:
    data = {"prompt_data": str(folder / "rows.jsonl"), "reward": ["my_inputs_reward:right"], "eval_size": 4}
    data |= {"environment": "my_inputs_game:Game", "ref_load": str(folder / "reference"), "kl_loss_coef": 0.1}
    return tiny_run(folder / "model", folder / "run", **data, **values)


ROWS_FLAG = "rows of --prompt-data"


@pytest.mark.parametrize(
    ("file", "change", "names"),
    [
        ("rows.jsonl", lambda old: old.replace(b'"17"}', b'"18"}'), [ROWS_FLAG]),
        ("rows.jsonl", lambda old: b"".join(sorted(old.splitlines(keepends=True))), [ROWS_FLAG, "held-out rows"]),
        ("model/chat_template.jinja", lambda old: old + b" ", ["chat template"]),
        ("model/tokenizer.json", lambda old: old.replace(b'r": null', b'r": {"type": "NFC"}', 1), ["tokenizer"]),
        ("my_inputs_reward.py", lambda old: old.replace(b"%", b"//"), ["source of --reward"]),
        ("my_inputs_helper.py", lambda old: b"N = 5\n", ["source of --reward"]),
        ("my_inputs_game.py", lambda old: old.replace(b"0", b"1"), ["source of --environment"]),
        ("reference/config.json", lambda old: old + b" ", ["files of --ref-load"]),
        ("model/preprocessor_config.json", lambda old: old + b" ", [MODEL]),
        ("model/model-00001-of-00002.safetensors", lambda old: old[:-1] + b"?", [MODEL]),
    ],
)
def test_a_resume_with_another_input_names_it_and_a_named_checkpoint_goes_on(
    folder: Path, file: str, change: Callable[[bytes], bytes], names: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    write(folder)
    (folder / file).write_bytes(change((folder / file).read_bytes()))
    with pytest.raises(CheckpointError, match="this has changed: ") as caught:
        Trainer(config(folder, num_rollout=2)).fit()
    checkpoint = folder / "run" / "checkpoints" / "step_00000001"
    assert f"this has changed: {', '.join(names)}; restore it, continue with it by --resume {checkpoint}" in str(
        caught.value
    )
    with Trainer(config(folder, num_rollout=2, resume=str(checkpoint))) as trainer:
        assert trainer.step == 1
    assert f"resumes with other inputs: {', '.join(names)}" in caplog.text


def test_a_resume_with_the_same_inputs_says_nothing(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(folder)
    with Trainer(config(folder, num_rollout=2)) as trainer:
        assert trainer.step == 1
    assert "inputs" not in caplog.text


@pytest.mark.parametrize("rank", [0, 2])
def test_evaluations_and_exports_of_a_changed_model_say_so_and_an_adapter_is_not_exported(
    tmp_path: Path, rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path)
    Trainer(config(tmp_path, num_rollout=1, lora_rank=rank)).fit()
    weights, checkpoint = (
        tmp_path / "model/model-00001-of-00002.safetensors",
        tmp_path / "run/checkpoints/step_00000001",
    )
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    manifest = checkpoint / "manifest.json"
    unread = manifest.rename(tmp_path / "aside") if rank else manifest  # refused before the weights are loaded
    with pytest.raises(CheckpointError, match="holds only an adapter") if rank else nullcontext():
        export_checkpoint(checkpoint, tmp_path / "exported")
    unread.rename(manifest)
    assert bool(rank) != (f"{MODEL} have changed since it was written" in caplog.text)
    with Trainer(config(tmp_path, num_rollout=0, lora_rank=rank, resume=str(checkpoint))) as trainer:
        trainer.evaluate()
    assert f"resumes with other inputs: {MODEL}\n" in caplog.text


def test_an_image_is_its_content_not_its_name(tmp_path: Path) -> None:
    image = tmp_path / "a.png"
    rows = as_rows([{"prompt": "x", "image": "a.png"}], DataConfig(label_key=""), folder=tmp_path, image_key="image")
    digests = []
    for content in (b"1", b"2", b"1"):
        image.write_bytes(content)
        digests.append(digest_rows(rows))
    assert digests[0] == digests[2] != digests[1]
    shown = [Images({"pixel_values": torch.full((1, 2), value)}, torch.zeros(1)) for value in (1.0, 2.0, 1.0)]
    read = [held_out_content(Prompt("x", [1], "", images=images)) for images in shown]
    assert read[0] == read[2] != read[1]


def test_a_partial_reward_is_its_function_and_arguments_and_an_agent_its_function() -> None:
    functions = [partial(test_an_image_is_its_content_not_its_name, 1), partial(load_file, 1), partial(load_file, 2)]
    assert len({source_of(function) for function in functions}) == 3
    assert source_of(functions[1]) == source_of(partial(load_file, 1)) == source_of(Agent(functions[1]))


def test_metadata_of_any_type_is_digested_by_all_its_values() -> None:
    values: list[Any] = [{1: "a", "b": 2}, {1: "a", "b": 3}, {2: "a", "b": 2}, {(1, 2): {3}}, {(1, 2): {4}}, None]
    values += [[None], np.arange(10_000), np.arange(10_000, dtype=np.int32), np.arange(10_000).clip(1)]
    values += [torch.zeros(5000), torch.zeros(5001), np.int64(1), 1]
    digests = [digest_rows([Row("0", "x", metadata={"value": value})]) for value in values]
    assert len(set(digests)) == len(values)
    assert digests == [digest_rows([Row("0", "x", metadata={"value": deepcopy(value)})]) for value in values]


def test_the_source_of_an_environment_is_its_class_and_what_that_file_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "bound_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "game.py").write_text("from . import rules\n\nclass Game:\n    rules = rules\n")
    (package / "rules.py").write_text("import json\nfrom bound_package.words import *\n")
    digests = set()
    for words in ("WORDS = 1\n", "WORDS = 2\n"):
        (package / "words.py").write_text(words)
        digests.add(source_of(importlib.import_module("bound_package.game").Game()))
    assert len(digests) == 2
