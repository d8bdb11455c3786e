"""Export a sharded model as a Hugging Face folder, written by rank 0."""

import json
import shutil
from collections.abc import Set
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import CheckpointError
from fsdptrain.feature import NO_FEATURES, Features
from fsdptrain.fsdp.export_folder import MARKER, publish_folder, temporary_of
from fsdptrain.fsdp.hub_files import FILE_BYTES, write_stream
from fsdptrain.fsdp.stream import stream_weights
from fsdptrain.model.loading.formats import read_config

_WEIGHT_SUFFIXES = {".bin", ".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".pth", ".safetensors"}
_NOT_COPIED = {"config.json", "README.md", ".gitattributes", MARKER}


def export_hf(
    model: PreTrainedModel,
    source: Path,
    target: Path,
    *,
    dtype: torch.dtype,
    features: Features = NO_FEATURES,
    max_file_bytes: int = FILE_BYTES,
) -> None:
    """Write `model` as a folder like `source`, the checkpoint that it was loaded from. Collective.

    Tokenizer, generation config, custom code and all other non-weight files are copied. The complete folder is renamed
    to `target` and replaces an older export. Raises CheckpointError on every rank.
    """
    temporary = temporary_of(target)
    failure = f"the model cannot be exported to {target}"
    stream = stream_weights(model, dtype=dtype, naming="hub", features=features)
    write_stream(temporary, stream, failure=failure, max_bytes=max_file_bytes)
    with raise_on_all_ranks(CheckpointError, failure):
        if dist.get_rank() == 0:
            write_config(source, temporary, dtype)
            copy_rest(source, temporary)
            publish_folder(target)


def copy_rest(source: Path, target: Path, *, but: Set[str] = frozenset()) -> None:
    """Copy all files that are neither weights nor config (tokenizer, code), except those named in `but`."""
    for path in source.iterdir():
        if path.is_dir() and path.name == "additional_chat_templates":
            shutil.copytree(path, target / path.name)
        elif path.is_file() and not _is_weights(path) and path.name not in _NOT_COPIED | but:
            shutil.copyfile(path, target / path.name)  # Hub snapshots are symlinks: copy the content


def write_config(source: Path, target: Path, dtype: torch.dtype) -> None:
    """Write the config of `source` with the new dtype and without quantization."""
    config = read_config(source)
    config.pop("quantization_config", None)
    config.pop("torch_dtype", None)  # older name of `dtype`
    config["dtype"] = str(dtype).removeprefix("torch.")
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _is_weights(path: Path) -> bool:
    return path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(".index.json")
