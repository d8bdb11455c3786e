"""Export of sharded models: dtypes, names, older exports. What comes out is what was loaded: test_sweep.py."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from fsdptrain.errors import CheckpointError
from fsdptrain.fsdp.export import ExportDtypes, export_hf
from fsdptrain.fsdp.shards import local_shard
from fsdptrain.fsdp.stream import stream_weights
from fsdptrain.model.structure import reshard
from tests import zoo
from tests.tensors import load_files
from tests.testing import save_hub, save_tiny_checkpoint, spawn

from .sharded import load_sharded

# untied; tied; experts stacked in the model; experts stacked in the files. Other families: test_sweep.py.
ARCHITECTURES = ["qwen3", "qwen2", "deepseek_v3", "gpt_oss", "qwen3_next"]


def write_zoo(name: str, folder: Path) -> Path:
    model = zoo.build(name, seed=3)
    return save_hub(model, folder, max_shard_size="100KB")


def in_bfloat16(folder: Path, prefix: str) -> None:
    """Store all tensors in bfloat16 but norms, biases and decays, as released files do; some lack `prefix`."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file).items()
        tensors = {name.removeprefix(prefix): x if x.ndim == 1 else x.bfloat16() for name, x in tensors}
        save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"dtype": "bfloat16", "nested": {"in": {"dtype": "bfloat16"}}}
    (folder / "config.json").write_text(json.dumps(config))


def export(model: PreTrainedModel, source: str, target: Path, dtype: torch.dtype, **options: int) -> None:
    dtypes = ExportDtypes(Path(source), dtype, dtype, model.base_model_prefix)
    export_hf(target, dtypes, partial(stream_weights, model, naming="hub"), **options)


def export_many(sources: list[str], targets: list[str], dtype: torch.dtype):
    for source, target in zip(sources, targets, strict=True):
        model = load_sharded(source)
        model(torch.arange(5, 25)[None], use_cache=False)  # groups that stay gathered must not be exported stale
        export(model, source, Path(target), dtype, max_file_bytes=100_000)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_tensor_keeps_the_precision_in_which_its_source_stores_it(tmp_path, dtype):
    sources = [write_zoo(name, tmp_path / f"in-{name}") for name in ARCHITECTURES]
    targets = [tmp_path / f"out-{name}" for name in ARCHITECTURES]
    for name, source in zip(ARCHITECTURES, sources, strict=True):
        in_bfloat16(source, "model." if name in ("qwen2", "deepseek_v3") else "")
    spawn(2, export_many, [str(p) for p in sources], [str(p) for p in targets], dtype)
    for source, target in zip(sources, targets, strict=True):
        stored, exported = ({n.removeprefix("model."): x for n, x in load_files(p).items()} for p in (source, target))
        assert {x.dtype for x in stored.values()} == {torch.bfloat16, torch.float32}
        for name, tensor in stored.items():
            assert exported[name].dtype == torch.promote_types(tensor.dtype, dtype), name
            assert torch.equal(exported[name].to(tensor.dtype), tensor), name
        config = json.loads((target / "config.json").read_text())
        assert config["dtype"] == config["nested"]["in"]["dtype"] == str(dtype).removeprefix("torch.")


def stream_in_both_namings(path: str):
    model = load_sharded(path)
    named = {name: p.full_tensor() for name, p in model.named_parameters()}
    module = dict(stream_weights(model, dtype=torch.float32, naming="module"))
    buffers = {name: tensor.dtype for name, tensor in stream_weights(model, dtype=torch.bfloat16, naming="module")}
    hub = dict(stream_weights(model, dtype=torch.bfloat16, naming="hub"))
    exact = all(torch.equal(module[name], tensor) for name, tensor in named.items())
    return exact, sorted(set(module) - set(named)), buffers, {name: tensor.dtype for name, tensor in hub.items()}


def test_module_names_are_those_of_the_modules_and_buffers_keep_their_dtype(tmp_path):
    source = write_zoo("deepseek_v3", tmp_path / "in")
    results = spawn(2, stream_in_both_namings, str(source))
    assert results[0] == results[1]
    exact, beyond_parameters, module, hub = results[0]
    assert exact
    assert [name.rpartition(".")[2] for name in beyond_parameters] == ["e_score_correction_bias"]
    assert hub.keys() == load_files(source).keys()
    for dtypes in (module, hub):
        assert {dtype for name, dtype in dtypes.items() if "correction_bias" not in name} == {torch.bfloat16}
        assert {dtype for name, dtype in dtypes.items() if "correction_bias" in name} == {torch.float32}


def export_again(source: str, target: str, blocked: str):
    """To bf16 over an older export, after a change; and to a place where a file is in the way."""
    model = load_sharded(source)
    export(model, source, Path(target), torch.float32)
    reshard(model)
    with torch.no_grad():
        for p in model.parameters():
            local_shard(p).mul_(2.0)
    export(model, source, Path(target), torch.bfloat16)
    with pytest.raises(CheckpointError) as caught:
        export(model, source, Path(blocked) / "hf", torch.float32)
    return str(caught.value), dist.get_rank()


def test_an_export_replaces_the_older_one_and_fails_on_all_ranks_together(tmp_path):
    source, target, blocked = save_tiny_checkpoint(tmp_path / "in"), tmp_path / "out", tmp_path / "file"
    blocked.write_text("in the way")
    for message, _ in spawn(2, export_again, str(source), str(target), str(blocked)):
        assert str(blocked) in message
        assert "\n" not in message
    assert {p.name for p in tmp_path.iterdir()} == {"in", "out", "file"}
    expected, found = load_files(source), load_files(target)
    assert all(torch.equal((expected[name] * 2).bfloat16(), tensor) for name, tensor in found.items())
    assert AutoModelForCausalLM.from_pretrained(target).dtype == torch.bfloat16
    assert sorted(p.name for p in target.glob("model*")) == ["model.safetensors"]
