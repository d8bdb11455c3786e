"""Folders of --hf-checkpoint with a broken file, or of a model that cannot be trained."""

import functools
import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from campaigns.inputs.case import Case, Place, edit, link_to_itself, remove, rewrite, shorten, train


def config(**values: Any) -> Callable[[Path], None]:
    return lambda model: edit(model / "config.json", **values)


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    """Change the tensors of one file. `change` alters the mapping in place."""

    def apply(model: Path) -> None:
        path = sorted(model.glob("*.safetensors"))[0]
        found = load_file(path)
        change(found)
        save_file(found, path, metadata={"format": "pt"})

    return apply


def first_name(found: Mapping[str, torch.Tensor]) -> str:
    return min(found)


def header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Change the JSON header of one safetensors file in place, and keep its data."""

    def new(content: bytes) -> bytes:
        size = struct.unpack("<Q", content[:8])[0]
        found = json.loads(content[8 : 8 + size])
        entries = {key: value for key, value in found.items() if key != "__metadata__"}
        changed = change(entries)
        text = json.dumps(entries if changed is None else changed).encode()
        return struct.pack("<Q", len(text)) + text + content[8 + size :]

    return rewrite("*.safetensors", new)


def set_entry(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda entries: entries[min(entries)].update(values)


def index(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(model: Path) -> None:
        path = model / "model.safetensors.index.json"
        found = json.loads(path.read_text())
        new = change(found)
        path.write_text(json.dumps(found if new is None else new))

    return apply


def to_pickles(model: Path) -> None:
    for path in model.glob("*.safetensors"):
        torch.save(load_file(path), model / "pytorch_model.bin")
        path.unlink()
    (model / "model.safetensors.index.json").unlink()


def to_gguf(model: Path) -> None:
    remove("*.safetensors", "*.index.json")(model)
    (model / "model.gguf").write_bytes(b"GGUF" + b"\0" * 64)


def with_nan(found: dict[str, torch.Tensor]) -> None:
    for tensor in found.values():
        tensor.fill_(float("nan"))


def links_to_themselves(model: Path) -> None:
    path = sorted(model.glob("*.safetensors"))[0]
    path.unlink()
    link_to_itself(path)


CODE = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}
TOKENS = "its tokenizer"
CHECKPOINTS: list[tuple[str, Callable[[Path], None], tuple[str, ...]]] = [
    ("no config", remove("config.json"), ("config.json",)),
    ("config is empty", rewrite("config.json", ""), ("config.json",)),
    ("config is no JSON", rewrite("config.json", "{]"), ("config.json",)),
    ("config is binary", rewrite("config.json", bytes(range(256))), ("config.json",)),
    ("config is a list", rewrite("config.json", "[1]"), ("config.json",)),
    ("config is a number", rewrite("config.json", "5"), ("config.json",)),
    ("config is null", rewrite("config.json", "null"), ("config.json",)),
    ("config is deep", rewrite("config.json", '{"a":' + "[" * 9000), ("config.json",)),
    ("config has nothing", rewrite("config.json", "{}"), ("--hf-checkpoint", "model_type")),
    ("unknown model_type", config(model_type="nothing"), ("--hf-checkpoint", "nothing")),
    ("model_type is a number", config(model_type=5), ("--hf-checkpoint",)),
    ("model_type is null", config(model_type=None), ("--hf-checkpoint",)),
    ("encoder", config(model_type="bert"), ("--hf-checkpoint",)),
    ("speech model", config(model_type="whisper"), ("--hf-checkpoint",)),
    ("remote code", config(model_type="own", auto_map=CODE), ("--trust-remote-code",)),
    ("auto_map is a list", config(model_type="own", auto_map=[1]), ("--hf-checkpoint",)),
    ("negative hidden_size", config(hidden_size=-64), ("--hf-checkpoint",)),
    ("hidden_size is text", config(hidden_size="big"), ("--hf-checkpoint", "hidden_size")),
    ("hidden_size 0", config(hidden_size=0), ("--hf-checkpoint",)),
    ("no layers", config(num_hidden_layers=0), ("--hf-checkpoint",)),
    ("a million layers", config(num_hidden_layers=10**6), ("--hf-checkpoint",)),
    ("heads do not divide", config(num_attention_heads=3, num_key_value_heads=2), ("--hf-checkpoint",)),
    ("other layer_types", config(layer_types=["full_attention"]), ("--hf-checkpoint", "layer")),
    ("unknown layer_types", config(layer_types=["x", "y"]), ("--hf-checkpoint",)),
    ("unknown activation", config(hidden_act="nothing"), ("--hf-checkpoint", "nothing")),
    ("unknown rope", config(rope_parameters={"rope_type": "nothing"}), ("--hf-checkpoint",)),
    ("rope is a text", config(rope_parameters="x"), ("--hf-checkpoint",)),
    ("unknown dtype", config(dtype="float3"), ("--hf-checkpoint", "float3")),
    ("quantized", config(quantization_config={"quant_method": "gptq", "bits": 4}), ("quantized", "gptq")),
    ("quantized by a text", config(quantization_config="int4"), ("quantized",)),
    ("quantized by a list", config(quantization_config=[4]), ("quantized",)),
    ("huge vocabulary", config(vocab_size=10**9), ("--hf-checkpoint",)),
    ("small vocabulary", config(vocab_size=100), ("--hf-checkpoint",)),
    ("vocabulary is text", config(vocab_size="264"), ("--hf-checkpoint",)),
    ("eos is a text", config(eos_token_id="end"), ("--hf-checkpoint",)),
    ("not tied", config(tie_word_embeddings=False), ("--hf-checkpoint", "lm_head")),
    ("no index", remove("*.index.json"), ("--hf-checkpoint", "model.safetensors")),
    ("index is empty", rewrite("*.index.json", ""), ("index.json",)),
    ("index is a list", index(lambda found: [1]), ("index.json",)),
    ("index is deep", rewrite("*.index.json", '{"weight_map":' + "[" * 9000), ("index.json",)),
    ("weight_map is a list", index(lambda found: {"weight_map": ["a"]}), ("index.json",)),
    ("weight_map has numbers", index(lambda found: {"weight_map": {"a": 1}}), ("index.json",)),
    ("weight_map is empty", index(lambda found: {"weight_map": {}}), ("--hf-checkpoint",)),
    ("file name is long", index(lambda found: {"weight_map": {"a": "x" * 300}}), ("index.json",)),
    ("file name has a NUL", index(lambda found: {"weight_map": {"a": "x\0"}}), ("index.json",)),
    ("file outside", index(lambda found: {"weight_map": {"a": "../x"}}), ("outside",)),
    ("absolute file", index(lambda found: {"weight_map": {"a": "/etc/passwd"}}), ("outside",)),
    ("file is no safetensors", index(lambda found: {"weight_map": {"a": "config.json"}}), ("config.json",)),
    ("no shards", remove("*.safetensors"), ("lacks model-00001",)),
    ("shard is empty", rewrite("*.safetensors", b""), ("model-00001",)),
    ("shard is short", rewrite("*.safetensors", shorten), ("model-00001",)),
    ("shard is long", rewrite("*.safetensors", lambda content: content + b"x"), ("model-00001",)),
    ("shard is text", rewrite("*.safetensors", "version https://git-lfs.github.com/spec/v1\n"), ("model-00001",)),
    ("shard is a link to itself", links_to_themselves, ("model-00001",)),
    ("header length huge", rewrite("*.safetensors", lambda content: b"\xff" * 8 + content[8:]), ("model-00001",)),
    ("header length 0", rewrite("*.safetensors", lambda content: b"\0" * 8 + content[8:]), ("model-00001",)),
    ("header is no JSON", rewrite("*.safetensors", lambda c: c[:8] + b"]" * (len(c) - 8)), ("model-00001",)),
    ("header is a list", header(lambda entries: [1]), ("model-00001",)),
    ("header is deep", header(lambda entries: functools.reduce(lambda a, _: [a], range(900), [])), ("model-00001",)),
    ("entry is a number", header(lambda entries: {min(entries): 5}), ("model-00001",)),
    ("unknown dtype in the header", header(set_entry(dtype="X9")), ("model-00001",)),
    ("8-bit dtype in the header", header(set_entry(dtype="F8_E4M3")), ("model-00001",)),
    ("integer dtype in the header", header(set_entry(dtype="I32")), ("--hf-checkpoint",)),
    ("complex dtype in the header", header(set_entry(dtype="C64")), ("model-00001",)),
    ("offsets overlap", header(set_entry(data_offsets=[0, 4])), ("model-00001",)),
    ("offsets negative", header(set_entry(data_offsets=[-4, 4])), ("model-00001",)),
    ("offsets beyond the file", header(set_entry(data_offsets=[0, 10**12])), ("model-00001",)),
    ("shape huge", header(set_entry(shape=[2**40, 2**40])), ("model-00001",)),
    ("shape negative", header(set_entry(shape=[-1])), ("model-00001",)),
    ("other shape", tensors(lambda found: found.update({first_name(found): torch.zeros(3, 3)})), ("shape",)),
    ("missing tensor", tensors(lambda found: found.pop(first_name(found))), ("--hf-checkpoint",)),
    ("all missing", tensors(lambda found: found.clear()), ("--hf-checkpoint",)),
    ("extra tensor", tensors(lambda found: found.update(extra=torch.zeros(3))), ("extra",)),
    ("integers", tensors(lambda found: found.update({k: v.long() for k, v in found.items()})), ("--hf-checkpoint",)),
    ("NaN weights", tensors(with_nan), ("--hf-checkpoint",)),
    ("pickles", to_pickles, ("pickles", ".bin")),
    ("GGUF", to_gguf, ("GGUF",)),
    ("no tokenizer", remove("tokenizer*"), ("--hf-checkpoint", "tokenizer")),
    ("tokenizer is empty", rewrite("tokenizer.json", ""), ("tokenizer",)),
    ("tokenizer is no JSON", rewrite("tokenizer.json", "{]"), ("tokenizer",)),
    ("tokenizer is a list", rewrite("tokenizer.json", "[]"), ("tokenizer",)),
    ("tokenizer has nothing", rewrite("tokenizer.json", "{}"), ("tokenizer",)),
    ("tokenizer config is broken", rewrite("tokenizer_config.json", "{]"), ("tokenizer",)),
    ("tokenizer config is a list", rewrite("tokenizer_config.json", "[]"), ("tokenizer",)),
    ("chat template does not parse", rewrite("chat_template.jinja", "{% for %}"), ("chat template",)),
    ("chat template raises", rewrite("chat_template.jinja", "{{ raise_exception('no') }}"), ("chat template",)),
    ("chat template divides by 0", rewrite("chat_template.jinja", "{{ 1 / 0 }}"), ("chat template",)),
    ("chat template is endless", rewrite("chat_template.jinja", "{{ 'x' * 10**12 }}"), ("chat template",)),
    ("chat template calls nothing", rewrite("chat_template.jinja", "{{ f() }}"), ("chat template",)),
    ("chat template is binary", rewrite("chat_template.jinja", b"\xff\xfe\0"), ("--hf-checkpoint", "utf-8")),
    ("chat template is missing", remove("chat_template.jinja"), ("chat template",)),
    ("generation config is broken", rewrite("generation_config.json", "{]"), ("generation_config.json",)),
    ("generation config is a list", rewrite("generation_config.json", "[1]"), ("generation_config.json",)),
    ("generation eos is a text", rewrite("generation_config.json", '{"eos_token_id": "a"}'), ("generation_config",)),
]


def cases() -> list[Case]:
    def row(name: str, change: Callable[[Path], None], texts: tuple[str, ...]) -> Case:
        def prepare(place: Place) -> list[str]:
            model = place.model()
            change(model)
            return train(place, "--hf-checkpoint", str(model), "--system-prompt", "auto")

        return Case("checkpoint", name, prepare, texts)

    return [row(*each) for each in CHECKPOINTS]
