"""Full weights out of a sharded model, layer by layer: to an engine, or to a folder that `from_pretrained` reads.

No rank ever holds more than one decoder layer (or the embedding) in full; rank 0 also holds one output file.
"""

import json
import shutil
from collections.abc import Iterator, Set
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from fsdptrain import platform
from fsdptrain.errors import CheckpointError
from fsdptrain.fsdp.checkpoint import sync_tree
from fsdptrain.fsdp.shards import model_tensors
from fsdptrain.models.collective import together
from fsdptrain.models.lora import Adapters
from fsdptrain.models.lora_weights import merged
from fsdptrain.models.materialize import moved
from fsdptrain.models.structure import repeated_layers, reshard, stock_class
from fsdptrain.protocols import Naming

_WEIGHT_SUFFIXES = {".bin", ".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".pth", ".safetensors"}
_NOT_COPIED = {"config.json", "README.md", ".gitattributes"}


def stream_weights(
    model: PreTrainedModel, *, dtype: torch.dtype, naming: Naming, adapters: Adapters | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(name, full tensor) of all that a checkpoint holds, tied weights once, on the device of the shards. Collective.

    Every rank must iterate to the end. `module` names are those of `model.named_parameters()`. `hub` names are those
    of the files: fused experts are taken apart again, by the conversions of transformers. Parameters are cast to
    `dtype` before they are gathered; buffers (such as DeepSeek's routing bias) keep theirs. `adapters` are merged into
    the weights, in float32: the names are those of the model without them.
    """
    reshard(model)
    detached = nullcontext if adapters is None else adapters.detached
    layers = {} if adapters is None else adapters.layers
    with detached():
        units = _units(model)
    for unit in units:
        gathered = {name: _full(tensor, dtype, layers.get(name)) for name, tensor in unit.items()}
        if naming == "hub":
            with detached(), stock_class(model):  # not while the caller has a tensor: it may run the model
                gathered = revert_weight_conversion(model, gathered)
        yield from gathered.items()


def _units(model: PreTrainedModel) -> list[dict[str, Tensor]]:
    """What is gathered together: each decoder layer, since conversions stay within one, and each other tensor alone."""
    layers = {id(layer) for layer in repeated_layers(model)}
    prefixes = [f"{name}." for name, module in model.named_modules() if id(module) in layers]
    inside: dict[str, dict[str, Tensor]] = {prefix: {} for prefix in prefixes}
    units: list[dict[str, Tensor]] = []
    for name, tensor in model_tensors(model).items():
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        if prefix is None:
            units.append({name: tensor})
            continue
        if not inside[prefix]:
            units.append(inside[prefix])
        inside[prefix][name] = tensor
    return units


@torch.no_grad()
def _full(tensor: Tensor, dtype: torch.dtype, adapter: nn.Module | None) -> Tensor:
    """Cast and moved as a shard, gathered on the device: the least memory, and the fast links, with offload too."""
    device = platform.local_device()
    if adapter is not None:
        tensor = merged(tensor, adapter, device).to(dtype)
    else:
        tensor = moved(tensor, device, dtype if isinstance(tensor, nn.Parameter) else tensor.dtype)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def export_hf(
    model: PreTrainedModel,
    source: Path,
    target: Path,
    *,
    dtype: torch.dtype,
    adapters: Adapters | None = None,
    max_shard_bytes: int = 4_000_000_000,
) -> None:
    """Write `model` as a folder like `source`, the checkpoint that it was loaded from. Collective.

    Tokenizer, generation config, custom code and all else but weights is copied. The folder gets its name `target`
    when it is whole; what was there before is replaced. Raises CheckpointError on every rank.
    """
    temporary = target.with_name(f".tmp-{target.name}")
    writer = _Writer(temporary, max_shard_bytes) if dist.get_rank() == 0 else None
    for name, tensor in stream_weights(model, dtype=dtype, naming="hub", adapters=adapters):
        if writer is not None:
            writer.add(name, tensor)
    with together(CheckpointError, f"the model cannot be exported to {target}"):
        if writer is not None:
            writer.finish()
            _write_config(source, temporary, dtype)
            copy_rest(source, temporary)
            sync_tree(temporary)
            replace_folder(temporary, target)


class _Writer:
    """Collects tensors into files of at most `max_bytes` (a bigger tensor has a file of its own).

    A failure is kept until `finish`: the other ranks are gathering with this one, and it must not leave them alone.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._total_bytes = 0
        self._files: list[list[str]] = []
        self._error: OSError | None = None
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        except OSError as error:
            self._error = error

    def add(self, name: str, tensor: Tensor) -> None:
        if self._error is not None:
            return
        if self._pending and self._pending_bytes + tensor.nbytes > self._max_bytes:
            self._flush()
        self._pending[name] = tensor.cpu().clone(memory_format=torch.contiguous_format)
        self._pending_bytes += tensor.nbytes

    def _flush(self) -> None:
        try:
            save_file(self._pending, self._folder / str(len(self._files)), metadata={"format": "pt"})
        except OSError as error:
            self._error = error
        self._files.append(list(self._pending))
        self._total_bytes += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0

    def finish(self) -> None:
        """Write what is left, give the files their names, write the index. Raises the first OSError of all."""
        if self._pending:
            self._flush()
        if self._error is not None:
            raise self._error
        if len(self._files) == 1:
            (self._folder / "0").rename(self._folder / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for i, names in enumerate(self._files):
            file_name = f"model-{i + 1:05d}-of-{len(self._files):05d}.safetensors"
            (self._folder / str(i)).rename(self._folder / file_name)
            weight_map |= dict.fromkeys(names, file_name)
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def copy_rest(source: Path, target: Path, *, but: Set[str] = frozenset()) -> None:
    """Tokenizer, code and all else that is neither weights nor config, as it is, but the files named `but`."""
    for path in source.iterdir():
        if path.is_dir() and path.name == "additional_chat_templates":
            shutil.copytree(path, target / path.name)
        elif path.is_file() and not _is_weights(path) and path.name not in _NOT_COPIED | but:
            shutil.copyfile(path, target / path.name)  # hub snapshots are links: take the content, not the link


def _write_config(source: Path, target: Path, dtype: torch.dtype) -> None:
    """That of `source` with the new dtype, and without a quantisation that is gone."""
    config = json.loads((source / "config.json").read_text())
    config.pop("quantization_config", None)
    config.pop("torch_dtype", None)  # the older name of `dtype`
    config["dtype"] = str(dtype).removeprefix("torch.")
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _is_weights(path: Path) -> bool:
    return path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(".index.json")


def replace_folder(temporary: Path, target: Path) -> None:
    """Give the whole folder `temporary` the name `target`, in place of what was there."""
    old = target.with_name(f".old-{target.name}")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    temporary.rename(target)
    shutil.rmtree(old, ignore_errors=True)
