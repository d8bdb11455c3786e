"""Every format of a checkpoint is loaded exactly, or refused with a command that converts it."""

import contextlib
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fsdptrain.algo.losses import LOSSES
from fsdptrain.config import Config
from fsdptrain.errors import CheckpointError
from fsdptrain.fsdp.backend import FSDPBackend
from fsdptrain.fsdp.shards import model_tensors
from fsdptrain.model.loading.files import resolve_checkpoint, weight_files
from fsdptrain.model.loading.meta import build_meta_model
from fsdptrain.model.policy import plain_batch
from fsdptrain.model.structure import decoder_layers
from fsdptrain.types import LossConfig
from tests import zoo
from tests.tensors import load_files
from tests.testing import save_hub, spawn, tiny_tokenizer

from .sharded import full, load_sharded

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def write(folder: Path, dtype: torch.dtype, *, sharded: bool) -> Path:
    zoo.build("qwen3", seed=5).to(dtype).save_pretrained(folder, max_shard_size="100KB" if sharded else "1GB")
    return folder


def as_hub_cache(folder: Path, cache: Path, name: str) -> None:
    """As huggingface_hub keeps what it has downloaded: a snapshot of links to blobs."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / "0123abcd"
    for directory in (snapshot, repository / "blobs", repository / "refs"):
        directory.mkdir(parents=True)
    (repository / "refs" / "main").write_text("0123abcd")
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.copyfile(file, repository / "blobs" / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))


def loaded(names: list[str], cache: str):
    huggingface_hub.constants.HF_HUB_CACHE, huggingface_hub.constants.HF_HUB_OFFLINE = cache, True
    paths = [resolve_checkpoint(name) for name in names]
    return [{name: full(tensor) for name, tensor in model_tensors(load_sharded(path)).items()} for path in paths]


def test_each_dtype_in_one_file_or_several_from_a_folder_or_the_hub_is_loaded_exactly(tmp_path):
    folders, names = [], []
    for dtype in DTYPES:
        for sharded in (False, True):
            folder = write(tmp_path / f"{dtype}-{sharded}".removeprefix("torch."), dtype, sharded=sharded)
            as_hub_cache(folder, tmp_path / "hub", f"me/{folder.name}")
            assert (len(weight_files(folder)) > 1) == sharded
            folders += [folder, folder]
            names += [str(folder), f"me/{folder.name}"]
    for found in spawn(2, loaded, names, str(tmp_path / "hub")):
        for folder, tensors in zip(folders, found, strict=True):
            expected = load_files(folder)
            assert expected.keys() == tensors.keys(), folder
            assert all(torch.equal(expected[name].float(), tensor) for name, tensor in tensors.items()), folder


def write_own(folder: Path) -> Path:
    from . import own_model

    torch.manual_seed(0)
    save_hub(own_model.OwnForCausalLM(own_model.OwnConfig()), folder)
    shutil.copyfile(own_model.__file__, folder / "modeling_own.py")
    code = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": code}))
    return folder


def step_on_own_code(path: str, target: str):
    backend = FSDPBackend(Config(hf_checkpoint=path, trust_remote_code=True, bf16=False, lr=1e-2), total_steps=2)
    batch = plain_batch([[5, 6, 7, 8, 9], [10, 11, 12]], device=torch.device("cpu"))
    metrics = backend.train_step([replace(batch, loss_weights=batch.loss_weights / 8)], LOSSES["sft"], LossConfig())
    backend.export(Path(target))
    layers = {type(layer).__name__ for layer in decoder_layers(backend.model)}
    return layers, backend.layout_probe.layout, metrics["optim/grad_norm"]


def test_a_model_with_code_of_its_own_is_sharded_by_its_blocks_and_trained(tmp_path):
    source, target = write_own(tmp_path / "own"), tmp_path / "out"
    for layers, layout, norm in spawn(2, step_on_own_code, str(source), str(target)):
        assert layers == {"FSDPOwnBlock"}
        assert layout == "padded"
        assert norm > 0
    trained = AutoModelForCausalLM.from_pretrained(target, trust_remote_code=True)
    before = load_files(source)
    assert type(trained).__name__ == "OwnForCausalLM"
    assert any(not torch.equal(before[name], p) for name, p in trained.named_parameters())


def as_mxfp4(folder: Path) -> None:
    """As gpt-oss lies on the hub: blocks of 32 numbers of four bits, and a scale for each."""
    zoo.build("gpt_oss").bfloat16().save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            weights[name] = tensor
            continue
        experts, columns, rows = tensor.shape
        blocks, scales = (experts, rows, columns // 32, 16), (experts, rows, columns // 32)
        weights[f"{name}_blocks"] = torch.randint(0, 256, blocks, dtype=torch.uint8, generator=generator)
        weights[f"{name}_scales"] = torch.randint(120, 125, scales, dtype=torch.uint8, generator=generator)
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    _quantize(folder, weights, {"quant_method": "mxfp4", "modules_to_not_convert": kept})


def as_fp8(folder: Path) -> None:
    """As DeepSeek-V3 and Qwen3-FP8 lie on the hub."""
    zoo.build("qwen3").bfloat16().save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if "_proj" in name]:
        rows, columns = weights[name].shape
        weights[name] = (weights[name].float() * 4).to(torch.float8_e4m3fn)
        weights[f"{name}_scale_inv"] = torch.full((-(-rows // 128), -(-columns // 128)), 0.25)
    _quantize(folder, weights, {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"})


def _quantize(folder: Path, weights: dict, how: dict) -> None:
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": how}))


@pytest.mark.parametrize(("make", "words"), [(as_mxfp4, r"quantized \(mxfp4\)"), (as_fp8, r"quantized \(fp8\)")])
def test_what_has_to_be_converted_is_refused_with_a_command_that_does_it(make, words, tmp_path):
    folder = tmp_path / "given"
    make(folder)
    tiny_tokenizer().save_pretrained(folder)
    with pytest.raises(CheckpointError, match=words) as caught:
        resolve_checkpoint(str(folder))
    code = re.fullmatch(r'.* by python -c "(.*)"', str(caught.value))
    assert code
    with contextlib.chdir(tmp_path):
        exec(code[1], {})
    copy = resolve_checkpoint(str(tmp_path / "given-copy"))
    model = build_meta_model(copy, trust_remote_code=False, attn_implementation="eager")
    stock = AutoModelForCausalLM.from_pretrained(copy, dtype="auto")
    assert stock.state_dict().keys() == model.state_dict().keys()
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()  # dequantized, or as it was
    found = spawn(1, loaded, [str(copy)], "")[0][0]
    for name, tensor in found.items():
        assert torch.equal(expected[name].float(), tensor), name
