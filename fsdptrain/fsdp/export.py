"""Full weights out of a sharded model, layer by layer: to an engine, or to a folder that `from_pretrained` reads.

No rank ever holds more than one decoder layer (or the embedding) in full, and what streams under the names of a
checkpoint holds only some of its experts. A folder is written by several ranks at the same time: while one writes a
layer, the others write theirs.
"""

import json
import logging
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import nullcontext
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
from fsdptrain.features.lora.adapters import Adapters
from fsdptrain.features.lora.weights import merged
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
_LEAST_PART = 1 << 28  # bytes for which another rank begins a file of its own
_SLICE = 1 << 28  # bytes of the experts that are gathered at a time
_TOKEN = ".written-by-rank-0"
logger = logging.getLogger(__name__)


def stream_weights(
    model: PreTrainedModel,
    *,
    dtype: torch.dtype,
    naming: Naming,
    adapters: Adapters | None = None,
    slice_bytes: int = _SLICE,
) -> Iterator[tuple[str, Tensor]]:
    """(name, full tensor) of all that a checkpoint holds, tied weights once, on the device of the shards. Collective.

    Every rank must iterate to the end. `module` names are those of `model.named_parameters()`. `hub` names are those
    of the files: fused experts are taken apart again, by the conversions of transformers, about `slice_bytes` of them
    at a time where that is possible. Parameters are cast to `dtype` before they are gathered; buffers (such as
    DeepSeek's routing bias) keep theirs. `adapters` are merged into the weights, in float32: the names are those of the
    model without them.
    """
    reshard(model)
    detached = nullcontext if adapters is None else adapters.detached
    layers = {} if adapters is None else adapters.layers
    with detached():
        units = _units(model)
    conversions = reversed_conversions(model) if naming == "hub" else []
    few = partial(in_slices, conversions=conversions, most_bytes=slice_bytes)

    def full(name: str, tensor: Tensor) -> Tensor:
        return _full(tensor, _dtype_of(tensor, dtype), layers.get(name))

    def hub(gathered: dict[str, Tensor]) -> dict[str, Tensor]:
        with detached():  # not while the caller has a tensor: it may run the model
            return revert_weight_conversion(model, gathered)

    for unit in units:
        if naming == "module":
            yield from ((name, full(name, tensor)) for name, tensor in unit.items())
            continue
        for name in [n for n, x in unit.items() if n not in layers and few(n, x)]:
            tensor = unit.pop(name)
            full_rows = partial(_full, dtype=_dtype_of(tensor, dtype))  # rows of a parameter are no parameter
            yield from expert_slices(name, tensor, most_bytes=slice_bytes, full=full_rows, convert=hub)
        yield from hub({name: full(name, tensor) for name, tensor in unit.items()}).items()


def _units(model: PreTrainedModel) -> list[dict[str, Tensor]]:
    """What is gathered together: each decoder layer, since conversions stay within one, and each other tensor alone."""
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
def _full(tensor: Tensor, dtype: torch.dtype, adapter: nn.Module | None = None) -> Tensor:
    """Cast and moved as a shard, gathered on the device: the least memory, and the fast links, with offload too."""
    device = platform.local_device()
    tensor = _merged(tensor, adapter).to(dtype) if adapter else moved(tensor, device, dtype)
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

    The ranks that see the folder of rank 0 write it together, each its own files; of a small model fewer do.
    Tokenizer, generation config, custom code and all else but weights is copied. The folder gets its name `target`
    when it is whole; what was there before is replaced. Raises CheckpointError on every rank.
    """
    temporary = target.with_name(f".tmp-{target.name}")
    failure = f"the model cannot be exported to {target}"
    ranks = _ranks_at(temporary, failure)
    reshard(model)
    detached = nullcontext if adapters is None else adapters.detached
    layers = {} if adapters is None else adapters.layers
    with raise_on_all_ranks(CheckpointError, failure):
        with detached():
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
                whole = gather_on(writers[i], _merged(tensor, layers.get(name)), _dtype_of(tensor, dtype))
                mine |= {} if whole is None else {name: whole}
        with raise_on_all_ranks(CheckpointError, failure), detached():
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
    """Make `folder` anew on rank 0: the ranks that see it, which are all of them where the disk is shared."""
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
    """Units by index, one of each writer at a time: they are written at the same time."""
    own = {writer: [i for i, other in enumerate(writers) if other == writer] for writer in writers}
    for turn in zip_longest(*own.values()):
        yield [i for i in turn if i is not None]


def _shapes(unit: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: torch.empty(t.shape, dtype=_dtype_of(t, dtype), device="meta") for name, t in unit.items()}


def _dtype_of(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Buffers keep theirs."""
    return dtype if isinstance(tensor, nn.Parameter) else tensor.dtype


def _merged(tensor: Tensor, adapter: nn.Module | None) -> Tensor:
    return tensor if adapter is None else merged(tensor, adapter, platform.local_device())


def copy_rest(source: Path, target: Path, *, but: Set[str] = frozenset()) -> None:
    """Tokenizer, code and all else that is neither weights nor config, as it is, but the files named `but`."""
    for path in source.iterdir():
        if path.is_dir() and path.name == "additional_chat_templates":
            shutil.copytree(path, target / path.name)
        elif path.is_file() and not _is_weights(path) and path.name not in _NOT_COPIED | but:
            shutil.copyfile(path, target / path.name)  # hub snapshots are links: take the content, not the link


def write_config(source: Path, target: Path, dtype: torch.dtype) -> None:
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
