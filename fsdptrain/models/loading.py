"""From a checkpoint on the hub or on disk to a sharded model in float32.

    path = resolve_checkpoint("Qwen/Qwen3-4B")      # downloads once for each node
    model = build_meta_model(path, ...)             # no memory
    shard_model(model, mesh, ...)                   # fsdp/wrap.py; may be left out
    load_weights(model, path, strategy="shard")     # each rank reads its own slices

All functions are collective, and fail on all ranks together. This is the only file that uses private functions of
transformers: `_ShardReader` stands on the reader behind `from_pretrained`, of the versions in `TESTED_TRANSFORMERS`.
"""

import copy
import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging as transformers_logging

from fsdptrain import platform
from fsdptrain.errors import CheckpointError, ConfigError
from fsdptrain.models.collective import gather, together
from fsdptrain.models.files import resolve_checkpoint, some_of, weight_files

TESTED_TRANSFORMERS = ((5, 17), (5, 24))  # from, and below

__all__ = ["build_meta_model", "load_weights", "resolve_checkpoint", "verify_loaded", "weight_files"]
logger = logging.getLogger(__name__)


def build_meta_model(path: Path, *, trust_remote_code: bool, attn_implementation: str) -> PreTrainedModel:
    """The model of `path` without weights: float32, on meta on every rank, tied as its config says, without a cache.

    Raises:
        CheckpointError: the config is missing, unknown to transformers, of a quantised model, or needs remote code.
    """
    with together(CheckpointError, f"--hf-checkpoint {path}"):
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        if quantisation := config.to_dict().get("quantization_config"):
            raise CheckpointError(
                f"--hf-checkpoint {path} is quantised ({quantisation.get('quant_method')}): weights must be bfloat16, "
                "float16 or float32 to be trained; most models have such a version on the hub"
            )
        config.use_cache = False  # with a cache transformers would not see the boundaries of a pack
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                config,
                dtype=torch.float32,
                attn_implementation=attn_implementation,
                trust_remote_code=trust_remote_code,
            )


def load_weights(model: PreTrainedModel, path: Path, *, strategy: str, cpu_offload: bool = False) -> None:
    """Fill the meta `model`, sharded or not, from the safetensors files of `path`; then verify it.

    Args:
        strategy: `shard`: each rank reads its own slices. `rank0`: rank 0 reads all of it into host memory and
            broadcasts, one tensor at a time; for checkpoints whose conversion needs whole tensors `shard` does so too.
        cpu_offload: what `shard_model` was given: parameters live on the host, buffers on the device.

    Raises:
        CheckpointError: on all ranks, with one message: a file is missing or broken, weights are missing, left over
            or of another shape, or are not tied as the config says.
        ConfigError: `shard` with a version of transformers whose reader was not tested.
    """
    with together(CheckpointError, f"--hf-checkpoint {path}"), _quiet_transformers():
        files = weight_files(path)
        if strategy == "shard" and (obstacle := _needs_whole_tensors(model, files)):
            logger.warning("%s: --load-strategy rank0 is used in place of shard", obstacle)
            strategy = "rank0"
    if strategy == "shard":
        _read_shards(model, path, files, cpu_offload=cpu_offload)
    else:
        _broadcast_from_rank0(model, path, cpu_offload=cpu_offload)
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(platform.local_device()))
    verify_loaded(model, path)


def verify_loaded(model: PreTrainedModel, path: Path) -> None:
    """Nothing on meta, everything float32, tied as the config says, and the same on every rank; collective."""
    with together(CheckpointError, f"--hf-checkpoint {path}"):
        if problems := _problems(model):
            raise CheckpointError(f"--hf-checkpoint {path}: {'; '.join(problems)}")
    _require_same_parameters(model, path)


def _problems(model: PreTrainedModel) -> list[str]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    on_meta = [name for name, tensor in tensors if tensor.is_meta]
    other_dtype = [name for name, parameter in model.named_parameters() if parameter.dtype != torch.float32]
    problems = [f"{some_of(on_meta)} not loaded"] if on_meta else []
    problems += [f"{some_of(other_dtype)} not float32"] if other_dtype else []
    for target, source in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if model.get_parameter(target) is not model.get_parameter(source):
            problems.append(f"the config ties {target} to {source}, but the files hold two different tensors")
    return problems


# ------------------------------------------------------------------------------------------- each rank its own slices


def _read_shards(model: PreTrainedModel, path: Path, files: list[Path], *, cpu_offload: bool) -> None:
    """transformers' own reader: it slices each safetensors entry as the DTensor of that name is sharded."""
    device = torch.device("cpu") if cpu_offload else platform.local_device()
    shards = _move_shards_to_host(model) if cpu_offload else {}
    load_config = LoadStateDictConfig(
        pretrained_model_name_or_path=str(path),
        dtype=torch.float32,
        device_map={"": device},
        weight_mapping=cast(list[WeightConverter | WeightRenaming], get_model_conversion_mapping(model)),
    )
    with together(CheckpointError, f"--hf-checkpoint {path}"), _quiet_transformers():
        info, _ = PreTrainedModel._load_pretrained_model(model, None, [str(file) for file in files], load_config)
        if info.mismatched_keys:
            names = sorted(name for name, _, _ in info.mismatched_keys)
            raise CheckpointError(f"--hf-checkpoint {path}: {some_of(names)} of another shape than config.json says")
        if info.conversion_errors:
            name, reason = min(info.conversion_errors.items())
            raise CheckpointError(f"--hf-checkpoint {path}: cannot convert {name}: {reason.strip().splitlines()[-1]}")
    _require_same(sorted(info.missing_keys), path)  # ties are compared over ranks below: all must come to the same ones
    with together(CheckpointError, f"--hf-checkpoint {path}"), _quiet_transformers():
        info = PreTrainedModel._finalize_model_loading(model, load_config, info)
        _refuse_leftovers(path, info.missing_keys, info.unexpected_keys)
        _restore_shards(model, shards)


def _needs_whole_tensors(model: PreTrainedModel, files: list[Path]) -> str:
    """Why slices cannot be read, or "".

    A conversion that splits or joins along the axis that is sharded mixes rows of different ranks, with the right
    shapes and without an error. Stacking experts and joining their gate and up along another axis is exact.
    """
    low, high = TESTED_TRANSFORMERS
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if not low <= version < high:
        raise ConfigError(
            f"--load-strategy shard is tested with transformers >= {low[0]}.{low[1]}, < {high[0]}.{high[1]}, "
            f"got {transformers.__version__}: install one of these, or use --load-strategy rank0"
        )
    parameters = model.state_dict()
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - not a mapping
                name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, parameters)
                if pattern is not None and not _commutes(by_pattern[pattern], parameters.get(name)):
                    return f"transformers converts {key} of the files by an operation that needs it whole"
    return ""


def _commutes(converter: WeightConverter, parameter: Tensor | None) -> bool:
    """Whether converting the slices gives the slice of the converted tensor."""
    if not isinstance(parameter, DTensor):
        return True
    sharded = {
        placement.dim
        for axis, placement in enumerate(parameter.placements)
        if isinstance(placement, Shard) and parameter.device_mesh.size(axis) > 1
    }
    for operation in converter.operations:
        if isinstance(operation, MergeModulelist) and operation.dim == 0:
            continue
        if isinstance(operation, Concatenate) and operation.dim not in sharded:
            continue
        return not sharded
    return True


def _refuse_leftovers(path: Path, missing: set[str], unexpected: set[str]) -> None:
    if missing:
        raise CheckpointError(f"--hf-checkpoint {path}: the files lack {some_of(sorted(missing))}, which the model has")
    if unexpected:
        raise CheckpointError(
            f"--hf-checkpoint {path}: the files hold {some_of(sorted(unexpected))}, which the model has not; "
            "does config.json belong to them?"
        )


def _move_shards_to_host(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Give each sharded parameter a stand-in on a mesh of CPUs; returns name -> original.

    The reader puts a shard where the mesh of its DTensor is. With CPU offload that is the accelerator, while the
    shards belong on the host.
    """
    originals: dict[str, Any] = {name: p for name, p in model.named_parameters() if isinstance(p, DTensor)}
    meshes = {mesh: _host_mesh(mesh) for mesh in {p.device_mesh for p in originals.values()}}
    stand_ins: dict[nn.Parameter, nn.Parameter] = {}
    for original in originals.values():
        shard = DTensor.from_local(
            torch.empty(original.to_local().shape, dtype=original.dtype, device="meta"),
            meshes[original.device_mesh],
            original.placements,
            run_check=False,
            shape=original.shape,
            stride=original.stride(),
        )
        stand_ins[original] = nn.Parameter(shard, requires_grad=original.requires_grad)
    _replace_parameters(model, stand_ins)
    return originals


def _host_mesh(mesh: DeviceMesh) -> DeviceMesh:
    return init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.mesh_dim_names)


def _restore_shards(model: PreTrainedModel, originals: dict[str, nn.Parameter]) -> None:
    """Put what the stand-ins have read into host tensors of the original mesh."""
    host = torch.device("cpu")
    loaded = {model.get_parameter(name): original for name, original in originals.items()}
    _replace_parameters(model, {read: _filled(original, _local(read), host) for read, original in loaded.items()})


# ------------------------------------------------------------------------------------------- rank 0 reads for all


def _broadcast_from_rank0(model: PreTrainedModel, path: Path, *, cpu_offload: bool) -> None:
    """Rank 0 loads the stock model in host memory; each tensor is broadcast, and each rank keeps its part of it.

    The order is that of the names on rank 0, proven to be the same on all ranks before the first broadcast.
    """
    _require_same_parameters(model, path)
    source: PreTrainedModel | None = None
    with together(CheckpointError, f"--hf-checkpoint {path}"), _quiet_transformers():
        if not dist.is_initialized() or dist.get_rank() == 0:
            source = _load_whole(model, path)
    device = platform.local_device()
    filled: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        _receive(whole, source.get_parameter(name) if source is not None else None)
        filled[parameter] = _filled(
            parameter, _own_part(whole, parameter), torch.device("cpu") if cpu_offload else device
        )
    _replace_parameters(model, filled)
    for name, buffer in list(model.named_buffers()):
        whole = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
        _receive(whole, source.get_buffer(name) if source is not None else None)
        owner, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(owner), own_name, whole)


def _load_whole(model: PreTrainedModel, path: Path) -> PreTrainedModel:
    """The stock model of `path` on the host, checked to be the one that `model` is on meta."""
    stock = next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))
    source, info = stock.from_pretrained(
        path, config=copy.deepcopy(model.config), dtype=torch.float32, use_safetensors=True, output_loading_info=True
    )
    _refuse_leftovers(path, set(info["missing_keys"]), set(info["unexpected_keys"]))
    if problems := _problems(source):
        raise CheckpointError(f"--hf-checkpoint {path}: {'; '.join(problems)}")
    assert {n: p.shape for n, p in source.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    assert [n for n, _ in source.named_buffers()] == [n for n, _ in model.named_buffers()]
    return source


@torch.no_grad()
def _receive(whole: Tensor, source: Tensor | None) -> None:
    """Fill `whole` with `source` of rank 0, in place; collective."""
    if source is not None:
        whole.copy_(source)
    if dist.is_initialized():
        dist.broadcast(whole, src=0)


def _own_part(whole: Tensor, parameter: nn.Parameter) -> Tensor:
    if not isinstance(parameter, DTensor):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()


# ------------------------------------------------------------------------------------------- small parts of both


@torch.no_grad()
def _filled(parameter: nn.Parameter, local: Tensor, device: torch.device) -> nn.Parameter:
    """A parameter like the meta `parameter`, on `device`, that holds `local`."""
    tensor = torch.empty_like(parameter, device=device)
    _local(tensor).copy_(local)
    return nn.Parameter(tensor, requires_grad=parameter.requires_grad)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _replace_parameters(model: nn.Module, new: dict[nn.Parameter, nn.Parameter]) -> None:
    """Wherever a key of `new` is registered, register its value: what was tied stays tied."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter in new:
                setattr(module, name, new[parameter])


def _require_same_parameters(model: PreTrainedModel, path: Path) -> None:
    facts = [(name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters()]
    facts += [(name, tuple(b.shape), str(b.dtype)) for name, b in model.named_buffers()]
    _require_same(hashlib.sha256(repr(facts).encode()).hexdigest(), path)


def _require_same(value: Any, path: Path) -> None:
    """CheckpointError on all ranks if `value` differs between them; collective."""
    values = gather(value)
    if any(other != values[0] for other in values):
        raise CheckpointError(
            f"--hf-checkpoint {path}: ranks see different checkpoints; is the folder on a shared disk?"
        )


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars and no load reports: what is wrong becomes one error."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
