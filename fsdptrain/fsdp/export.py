"""Stream full weights out of a sharded model, layer by layer, to an engine or a Hugging Face folder.

No rank ever holds more than one decoder layer (or the embedding) in full; with `hub` names it holds only some of the
experts of a layer. Several ranks write a folder at the same time, each its own layers.
"""

import json
import logging
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import partial
from itertools import zip_longest
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from fsdptrain import platform
from fsdptrain.distributed import gather, raise_on_all_ranks
from fsdptrain.errors import CheckpointError
from fsdptrain.feature import NO_FEATURES, Features
from fsdptrain.fsdp.checkpoint import sync_tree
from fsdptrain.fsdp.expert_slices import expert_slices, in_slices, reversed_conversions
from fsdptrain.fsdp.gather import gather_on
from fsdptrain.fsdp.hub_files import HubWriter, plan_files, share_out, write_index
from fsdptrain.fsdp.shards import model_tensors
from fsdptrain.model.loading.materialize import moved
from fsdptrain.model.structure import repeated_layers, reshard
from fsdptrain.protocols import Naming

_WEIGHT_SUFFIXES = {".bin", ".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".pth", ".safetensors"}
_NOT_COPIED = {"config.json", "README.md", ".gitattributes"}
_LEAST_PART = 1 << 28  # minimum bytes for an additional rank to write files
_SLICE = 1 << 28  # bytes of experts gathered at a time
_TOKEN = ".written-by-rank-0"
logger = logging.getLogger(__name__)


def stream_weights(
    model: PreTrainedModel,
    *,
    dtype: torch.dtype,
    naming: Naming,
    features: Features = NO_FEATURES,
    slice_bytes: int = _SLICE,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full tensor) of everything in a checkpoint, on the device of the shards. Collective.

    Every rank must iterate to the end. Tied weights are yielded once. `module` names are those of
    `model.named_parameters()`. `hub` names are those of the files: the conversions of transformers split fused experts,
    about `slice_bytes` at a time where possible. Parameters are cast to `dtype` before the gather. Buffers (such as
    DeepSeek's routing bias) keep their dtype. Names are those of the model without the parameters that `features` add.
    Features apply changes to weights in float32.
    """
    reshard(model)
    with features.without():
        units = _units(model)
    conversions = reversed_conversions(model) if naming == "hub" else []
    few = partial(in_slices, conversions=conversions, most_bytes=slice_bytes)

    def full(name: str, tensor: Tensor) -> Tensor:
        return _full(tensor, _dtype_of(tensor, dtype), features.full_precision_weight(name, tensor))

    def hub(gathered: dict[str, Tensor]) -> dict[str, Tensor]:
        with features.without():  # not across a yield: the caller may run the model
            return revert_weight_conversion(model, gathered)

    for unit in units:
        if naming == "module":
            yield from ((name, full(name, tensor)) for name, tensor in unit.items())
            continue
        for name in [n for n, x in unit.items() if few(n, x) and not features.changes_weight(n)]:
            tensor = unit.pop(name)
            full_rows = partial(_full, dtype=_dtype_of(tensor, dtype))  # row slices are not nn.Parameter
            yield from expert_slices(name, tensor, most_bytes=slice_bytes, full=full_rows, convert=hub)
        yield from hub({name: full(name, tensor) for name, tensor in unit.items()}).items()


def _units(model: PreTrainedModel) -> list[dict[str, Tensor]]:
    """Group the tensors that are gathered together.

    Each layer is a group, since conversions stay within a layer. Each other tensor is a group of one.
    """
    layers = set(repeated_layers(model))
    prefixes = [f"{name}." for name, module in model.named_modules() if module in layers]
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
def _full(tensor: Tensor, dtype: torch.dtype, changed: Tensor | None = None) -> Tensor:
    """Gather `changed` or `tensor` on the device. The shard is cast and moved first."""
    tensor = moved(tensor, platform.local_device(), dtype) if changed is None else changed.to(dtype)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def export_hf(
    model: PreTrainedModel,
    source: Path,
    target: Path,
    *,
    dtype: torch.dtype,
    features: Features = NO_FEATURES,
    max_shard_bytes: int = 4_000_000_000,
) -> None:
    """Write `model` as a folder like `source`, the checkpoint that it was loaded from. Collective.

    The ranks that see rank 0's folder each write their own files; for a small model fewer ranks write. Tokenizer,
    generation config, custom code and all other non-weight files are copied. The complete folder is renamed to `target`
    and replaces an existing one. Raises CheckpointError on every rank.
    """
    temporary = target.with_name(f".tmp-{target.name}")
    failure = f"the model cannot be exported to {target}"
    ranks = _ranks_at(temporary, failure)
    reshard(model)
    with raise_on_all_ranks(CheckpointError, failure):
        with features.without():
            units = _units(model)
            hub = [revert_weight_conversion(model, _shapes(unit, dtype)) for unit in units]
        total = sum(tensor.nbytes for unit in hub for tensor in unit.values())
        num_writers = min(len(ranks), max(1, total // min(max_shard_bytes, _LEAST_PART)))
        writers = [ranks[place] for place in share_out(hub, num_writers)]
        files = plan_files(hub, writers, max_bytes=max_shard_bytes)
        writer = HubWriter(temporary, [file for file in files if file.writer == dist.get_rank()])
    for turn in _turns(writers):
        mine: dict[str, Tensor] = {}
        for i in turn:
            for name, tensor in units[i].items():
                changed = features.full_precision_weight(name, tensor)
                whole = gather_on(writers[i], tensor if changed is None else changed, _dtype_of(tensor, dtype))
                mine |= {} if whole is None else {name: whole}
        with raise_on_all_ranks(CheckpointError, failure), features.without():
            writer.write(revert_weight_conversion(model, mine))
    with raise_on_all_ranks(CheckpointError, failure):
        writer.finish()
    with raise_on_all_ranks(CheckpointError, failure):
        if dist.get_rank() == 0:
            write_index(temporary, files)
            write_config(source, temporary, dtype)
            copy_rest(source, temporary)
            (temporary / _TOKEN).unlink()
            sync_tree(temporary)
            replace_folder(temporary, target)


def _ranks_at(folder: Path, failure: str) -> list[int]:
    """Recreate `folder` on rank 0 and return the ranks that see it: all of them on a shared disk."""
    token = gather(secrets.token_hex(8))[0]
    with raise_on_all_ranks(CheckpointError, failure):
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            (folder / _TOKEN).write_text(token)
    with raise_on_all_ranks(CheckpointError, failure):
        sees = (folder / _TOKEN).is_file() and (folder / _TOKEN).read_text() == token
    ranks = [rank for rank, found in enumerate(gather(sees)) if found]
    if dist.get_rank() == 0 and len(ranks) < dist.get_world_size():
        logger.warning(
            "%s is not on a disk that all nodes share: only %d of %d ranks write the model, where rank 0 is",
            *(folder.parent.resolve(), len(ranks), dist.get_world_size()),
        )
    return ranks


def _turns(writers: Sequence[int]) -> Iterator[list[int]]:
    """Yield turns of unit indices, one unit per writer, to be written in parallel."""
    own = {writer: [i for i, other in enumerate(writers) if other == writer] for writer in writers}
    for turn in zip_longest(*own.values()):
        yield [i for i in turn if i is not None]


def _shapes(unit: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: torch.empty(t.shape, dtype=_dtype_of(t, dtype), device="meta") for name, t in unit.items()}


def _dtype_of(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return `dtype` for parameters. Buffers keep their dtype."""
    return dtype if isinstance(tensor, nn.Parameter) else tensor.dtype


def copy_rest(source: Path, target: Path, *, but: Set[str] = frozenset()) -> None:
    """Copy all files that are neither weights nor config (tokenizer, code), except those named in `but`."""
    for path in source.iterdir():
        if path.is_dir() and path.name == "additional_chat_templates":
            shutil.copytree(path, target / path.name)
        elif path.is_file() and not _is_weights(path) and path.name not in _NOT_COPIED | but:
            shutil.copyfile(path, target / path.name)  # Hub snapshots are symlinks: copy the content


def write_config(source: Path, target: Path, dtype: torch.dtype) -> None:
    """Write the config of `source` with the new dtype and without quantization."""
    config = json.loads((source / "config.json").read_text())
    config.pop("quantization_config", None)
    config.pop("torch_dtype", None)  # older name of `dtype`
    config["dtype"] = str(dtype).removeprefix("torch.")
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _is_weights(path: Path) -> bool:
    return path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(".index.json")


def replace_folder(temporary: Path, target: Path) -> None:
    """Rename the complete folder `temporary` to `target`, replacing an existing one."""
    old = target.with_name(f".old-{target.name}")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    temporary.rename(target)
    shutil.rmtree(old, ignore_errors=True)
