"""A checkpoint is complete, or one line names the missing file."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fsdptrain.errors import CheckpointError
from fsdptrain.model.loading.files import resolve_checkpoint, some_of, weight_files
from fsdptrain.model.loading.meta import model_config
from fsdptrain.rollout.stop_tokens import stop_tokens
from tests.testing import save_tiny_checkpoint


def test_files_are_those_of_the_index(tmp_path: Path):
    save_tiny_checkpoint(tmp_path)
    assert resolve_checkpoint(str(tmp_path)) == tmp_path
    assert weight_files(tmp_path) == sorted(tmp_path.glob("*.safetensors"))
    assert len(weight_files(tmp_path)) > 1


def test_a_missing_file_is_named(tmp_path: Path):
    save_tiny_checkpoint(tmp_path)
    for file in weight_files(tmp_path)[1:]:
        file.rename(tmp_path / "aside")
        with pytest.raises(CheckpointError, match=f"lacks {file.name}"):
            resolve_checkpoint(str(tmp_path))
        (tmp_path / "aside").rename(file)


def test_a_name_that_is_neither_a_folder_nor_on_the_hub_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        CheckpointError, match="--hf-checkpoint nobody/nothing is not a local folder, was not downloaded"
    ):
        resolve_checkpoint("nobody/nothing")


def test_a_path_that_cannot_be_a_hub_name_is_refused_as_a_path():
    with pytest.raises(
        CheckpointError, match=r"--hf-checkpoint runs/start/hf is not a local folder, .* is it misspelt"
    ):
        resolve_checkpoint("runs/start/hf")


def set_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


DEEP = "[" * 9000


@pytest.mark.parametrize("content", ["", "{]", "[1]", "5", "null", DEEP, "\udcff"])
def test_a_config_that_is_no_object_is_refused_by_name(tmp_path: Path, content: str):
    save_tiny_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(content, errors="surrogateescape")
    with pytest.raises(CheckpointError, match=f"--hf-checkpoint {tmp_path}: config.json "):
        resolve_checkpoint(str(tmp_path))


@pytest.mark.parametrize("index", [DEEP, '{"weight_map": {"a": 1}}', f'{{"weight_map": {{"a": "{"x" * 300}"}}}}'])
def test_an_index_that_names_no_files_is_refused_by_name(tmp_path: Path, index: str):
    save_tiny_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"index\.json is broken"):
        resolve_checkpoint(str(tmp_path))


@pytest.mark.parametrize("quantization", ["int4", [4], {"quant_method": "gptq"}])
def test_any_quantization_is_refused(tmp_path: Path, quantization: Any):
    save_tiny_checkpoint(tmp_path)
    set_config(tmp_path, quantization_config=quantization)
    with pytest.raises(CheckpointError, match="is quantized"):
        resolve_checkpoint(str(tmp_path))


def test_integer_weights_are_refused_and_integer_buffers_are_not(tmp_path: Path):
    save_tiny_checkpoint(tmp_path)
    first = weight_files(tmp_path)[0]
    weights = load_file(first)
    save_file(weights | {"position_ids": torch.arange(3)}, first)
    weight_files(tmp_path)
    save_file({name: weight.long() for name, weight in weights.items()}, first)
    with pytest.raises(CheckpointError, match=r"holds .*\.weight in I64"):
        weight_files(tmp_path)


@pytest.mark.parametrize(
    "values",
    [{"model_type": "nothing"}, {"model_type": None}, {"hidden_size": "big"}, {"dtype": "float3"}, {"layer_types": []}],
)
def test_a_config_that_transformers_refuses_is_one_line_with_the_checkpoint(tmp_path: Path, values: dict[str, Any]):
    save_tiny_checkpoint(tmp_path)
    set_config(tmp_path, **values)
    with pytest.raises(CheckpointError, match=f"--hf-checkpoint {tmp_path}: config.json is not usable") as caught:
        model_config(tmp_path, trust_remote_code=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["{]", "[1]", '{"eos_token_id": "end"}', '{"eos_token_id": [1, "end"]}'])
def test_a_broken_generation_config_is_refused_by_name(tmp_path: Path, content: str):
    save_tiny_checkpoint(tmp_path)
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"generation_config\.json") as caught:
        stop_tokens(tmp_path, model_config(tmp_path, trust_remote_code=False), trust_remote_code=False)
    assert "\n" not in str(caught.value)


def test_long_lists_are_cut():
    assert some_of(["a", "b"]) == "a, b"
    assert some_of(list("abcdef")) == "a, b, c and 3 more"
