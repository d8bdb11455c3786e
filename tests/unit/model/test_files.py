"""A checkpoint is complete, or one line names the missing file."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from fsdptrain.config import Config, DataConfig
from fsdptrain.errors import CheckpointError
from fsdptrain.fsdp.export import ExportDtypes, copy_rest, new_stop_tokens
from fsdptrain.model.loading import hub
from fsdptrain.model.loading.files import resolve_checkpoint, weight_files
from fsdptrain.model.loading.meta import model_config
from fsdptrain.rollout.stop_tokens import stop_tokens
from tests.testing import save_tiny_checkpoint


def test_files_are_those_of_the_index(tmp_path: Path):
    save_tiny_checkpoint(tmp_path)
    assert resolve_checkpoint(str(tmp_path)) == tmp_path
    assert weight_files(tmp_path) == sorted(tmp_path.glob("*.safetensors"))
    assert len(weight_files(tmp_path)) > 1


@pytest.mark.parametrize("name", ["nobody/nothing", "runs/start/hf"])
def test_a_name_that_is_neither_a_folder_nor_on_the_hub_is_refused(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=f"--hf-checkpoint {name} is not a local folder, and cannot be") as caught:
        resolve_checkpoint(name)
    assert "\n" not in str(caught.value)


def test_the_first_process_of_a_machine_downloads_what_all_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    save_tiny_checkpoint(tmp_path)
    calls: list[tuple[str, list[str], bool]] = []

    def snapshot(name: str, *, allow_patterns: list[str], local_files_only: bool, **_: Any) -> str:
        calls.append((name, allow_patterns, local_files_only))
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    assert resolve_checkpoint("mine/model") == tmp_path
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert resolve_checkpoint("mine/model") == tmp_path
    whole = [*hub.HUB_FILES, *hub.WEIGHT_FILES]
    assert calls == [("mine/model", whole, only_local) for only_local in (False, True, True)]
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    assert resolve_checkpoint("mine/model", weights=False) == tmp_path
    assert calls[3:] == [("mine/model", hub.HUB_FILES, True)]
    assert hub.resolve_config("mine/model") == tmp_path
    assert calls[-1] == ("mine/model", ["*.json", "*.py"], False)


@pytest.mark.parametrize("local_rank", ["0", "1"])
def test_an_error_of_the_hub_names_the_checkpoint(local_rank: str, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: Any, **__: Any) -> str:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(hub, "snapshot_download", broken)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    with pytest.raises(CheckpointError, match=r"--hf-checkpoint mine/model.*no such thing"):
        resolve_checkpoint("mine/model")


def set_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


CONFIG, INDEX, DEEP = "config.json", "model.safetensors.index.json", "[" * 9000
LONG_NAME = json.dumps({"weight_map": {"a": "x" * 300}})


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        *((CONFIG, content, f"{CONFIG} ") for content in ("", "{]", "[1]", "5", "null", DEEP, "\udcff")),
        *((INDEX, content, f"{INDEX} is broken") for content in (DEEP, '{"weight_map": {"a": 1}}', LONG_NAME)),
        ("adapter_config.json", "{}", "holds an adapter beside the model: merge it by peft"),
        *(
            (CONFIG, f'{{"quantization_config": {how}}}', "is quantized")
            for how in ('"int4"', "[4]", '{"quant_method": "gptq"}')
        ),
    ],
)
def test_a_folder_that_is_no_whole_model_is_refused_by_name(tmp_path: Path, file: str, content: str, words: str):
    save_tiny_checkpoint(tmp_path)
    (tmp_path / file).write_text(content, errors="surrogateescape")
    with pytest.raises(CheckpointError, match=f"--hf-checkpoint {tmp_path}.*{words}"):
        resolve_checkpoint(str(tmp_path))


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


def test_what_a_generation_config_says_without_effect_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    save_tiny_checkpoint(tmp_path)
    values = {"repetition_penalty": 1.05, "forced_bos_token_id": 0, "min_new_tokens": 1}
    neutral = {"eos_token_id": 1, "top_k": 20, "no_repeat_ngram_size": 0, "suppress_tokens": []}
    (tmp_path / "generation_config.json").write_text(json.dumps(values | neutral))
    with caplog.at_level("INFO"):
        stop_tokens(tmp_path, model_config(tmp_path, trust_remote_code=False), trust_remote_code=False)
    assert f"sampled without {', '.join(values)} of generation_config.json" in caplog.text


@pytest.mark.parametrize(
    "content", ["{]", "[1]", *(f'{{"eos_token_id": {x}}}' for x in ('"end"', '[1, "end"]', "-1", "[1, 999999]"))]
)
def test_a_broken_generation_config_is_refused_by_name(tmp_path: Path, content: str):
    save_tiny_checkpoint(tmp_path)
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"generation_config\.json") as caught:
        stop_tokens(tmp_path, model_config(tmp_path, trust_remote_code=False), trust_remote_code=False)
    assert "\n" not in str(caught.value)


PATHS = {
    "_name_or_path": "/secret/a",
    "vocab_file": "C:\\secret\\a",
    "of": [{"x_dir": '/secret"/a'}],
    "t_file": "a/hub",
}
SHOWN = PATHS | {"_name_or_path": "a", "vocab_file": "a", "of": [{"x_dir": "a"}]}


def test_an_export_copies_only_files_of_a_model_and_no_path_of_this_machine(tmp_path: Path):
    source, target = save_tiny_checkpoint(tmp_path / "source"), tmp_path / "target"
    target.mkdir()
    of_model = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"}
    of_model |= {"config.json", "LICENSE", "code.py", "parts.py"}
    for name in ("LICENSE", ".env", "credentials.json", "notes.txt", "train.py", "parts.py", "model.bin.index.json"):
        (source / name).write_text("x")
    (source / "code.py").write_text("from .parts import X")
    set_config(source, auto_map={"AutoModel": "code.Model"}, **PATHS)
    (source / "tokenizer_config.json").write_text(json.dumps(PATHS))
    ExportDtypes(source, torch.float32, torch.float32, "model").write_config(target)
    copy_rest(source, target)
    assert {path.name for path in target.iterdir()} == of_model
    for name in ("tokenizer_config.json", "config.json"):
        assert SHOWN.items() <= json.loads((target / name).read_text()).items()


def test_the_token_that_ends_turns_of_the_template_ends_responses_and_is_exported(tmp_path: Path):
    for end in (0, 1):  # the template ends turns with 1
        source, target = save_tiny_checkpoint(tmp_path / f"{end}", eos_token_id=end), tmp_path / f"export{end}"
        config, run = model_config(source, trust_remote_code=False), Config(hf_checkpoint=str(source))
        read = partial(stop_tokens, source, config, trust_remote_code=False)
        assert read() == read(data=DataConfig(apply_chat_template=False)) == (end,)
        assert set(read(data=run.data)) == {end, 1}
        target.mkdir()
        copy_rest(source, target, stop=new_stop_tokens(source, config, run))
        exported, original = ((folder / "generation_config.json").read_text() for folder in (target, source))
        assert (exported == original) == (end == 1)
        found = GenerationConfig.from_pretrained(target)
        assert (found.eos_token_id, bool(found._from_model_config)) == ((1, True) if end == 1 else ([0, 1], False))
