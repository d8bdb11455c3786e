"""Load a checkpoint from the Hub or disk into a sharded model, in float32 by default.

    path = resolve_checkpoint("Qwen/Qwen3-4B")      # downloads once per node
    model = build_meta_model(path, ...)             # no memory
    shard_model(model, mesh, ...)                   # fsdp/wrap.py; optional
    load_weights(model, path)                       # each rank reads its own slices

All functions are collective and fail on all ranks together. `shard_reader.py` uses private functions of transformers,
the reader behind `from_pretrained`, and is limited to the versions in `TESTED_TRANSFORMERS`.
"""

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from fsdptrain import platform
from fsdptrain.distributed import one_line, raise_on_all_ranks, require_same
from fsdptrain.errors import CheckpointError
from fsdptrain.model.attention.attention import set_attention
from fsdptrain.model.loading.files import different_files, resolve_checkpoint, some_of, weight_files
from fsdptrain.model.loading.formats import read_config, refuse_quantized
from fsdptrain.model.loading.materialize import quiet_transformers, register

TESTED_TRANSFORMERS = ((5, 17), (5, 24))  # minimum (inclusive), maximum (exclusive)

__all__ = ["build_meta_model", "load_weights", "resolve_checkpoint", "weight_files"]
logger = logging.getLogger(__name__)


def build_meta_model(path: Path, *, trust_remote_code: bool, attn_implementation: str) -> PreTrainedModel:
    """Build the model of `path` on meta on every rank: float32, no weights, tied as in its config, no KV cache.

    Raises:
        CheckpointError: the config is missing, unknown to transformers, of a quantized model, or needs remote code.
    """
    with raise_on_all_ranks(CheckpointError, f"--hf-checkpoint {path}"):
        config = model_config(path, trust_remote_code=trust_remote_code)
        refuse_quantized(path)
        known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        if not known and "auto_map" not in config.to_dict():
            raise CheckpointError(
                f"--hf-checkpoint {path} is a {config.model_type}, of which transformers has no causal language model"
            )
        config.use_cache = False  # with a cache transformers ignores the boundaries of a pack
        options = {"dtype": torch.float32, "trust_remote_code": trust_remote_code}
        with init_empty_weights(include_buffers=True):
            try:
                model = model_from_config(config, attn_implementation=attn_implementation, **options)
            except KeyError as error:
                if error.args != (attn_implementation,):
                    raise
                # a few models have one class per known implementation (falcon); the layout probe decides
                return model_from_config(config, attn_implementation="eager", **options)
        set_attention(model, attn_implementation)
        return model


def model_from_config(config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    """Build a model of `config` without weights. `options` are those of transformers' `from_config`.

    The vision-language class is used if the config names it as its architecture (Qwen3.5 exists only in that form), or
    if transformers has no causal language model for the config. Otherwise the causal language model is used.
    """
    kind = type(config)
    sees = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and _names_vision(config)
    auto = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    return auto.from_config(config, **options)


def _names_vision(config: PreTrainedConfig) -> bool:
    kind = type(config)
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return True
    sees: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[kind]
    return sees.__name__ in (config.architectures or ())


def load_weights(model: PreTrainedModel, path: Path, *, cpu_offload: bool = False) -> None:
    """Fill the meta `model`, sharded or not, in its dtypes from the safetensors files of `path`, then verify it.

    Each rank reads its own slices. If the conversion of the checkpoint needs whole tensors, or the version of
    transformers is not tested, rank 0 reads everything into host memory and broadcasts one tensor at a time.

    Args:
        cpu_offload: as given to `shard_model`: parameters are on the host, buffers on the device.

    Raises:
        CheckpointError: on all ranks, with one message: a file is missing or corrupt, weights are missing, unexpected,
            of another shape, or not tied as the config requires.
    """
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    if not _read_shards(model, path, cpu_offload=cpu_offload):
        from fsdptrain.model.loading.rank0 import broadcast_from_rank0

        require_same_parameters(model, path)
        broadcast_from_rank0(model, path, cpu_offload=cpu_offload)
    for name, buffer in list(model.named_buffers()):
        register(model, [name], buffer.to(platform.local_device()))
    with raise_on_all_ranks(CheckpointError, f"--hf-checkpoint {path}"):
        if problems := problems_of(model, dtypes):
            raise CheckpointError(f"--hf-checkpoint {path}: {'; '.join(problems)}")
    require_same_parameters(model, path)


def model_config(path: Path, *, trust_remote_code: bool) -> PreTrainedConfig:
    """Raises CheckpointError if transformers does not accept config.json, or it needs remote code."""
    if not trust_remote_code:
        _refuse_remote_code(path)
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise CheckpointError(f"--hf-checkpoint {path}: config.json is not usable: {one_line(error)}") from error


def _refuse_remote_code(path: Path) -> None:
    config = read_config(path)
    if "auto_map" in config and config.get("model_type") not in CONFIG_MAPPING:
        raise CheckpointError(
            f"--hf-checkpoint {path} needs the Python code that it ships: read it, then allow it by --trust-remote-code"
        )


def problems_of(model: PreTrainedModel, dtypes: Mapping[str, torch.dtype]) -> list[str]:
    """List parameters and buffers on meta, those not in `dtypes`, and ties that differ from the config."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    on_meta = [name for name, tensor in tensors if tensor.is_meta]
    other_dtype = [name for name, p in model.named_parameters() if p.dtype != dtypes.get(name, p.dtype)]
    problems = [f"{some_of(on_meta)} not loaded"] if on_meta else []
    problems += [f"{some_of(other_dtype)} not in the dtype to store it in"] if other_dtype else []
    for target, source in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if model.get_parameter(target) is not model.get_parameter(source):
            problems.append(f"the config ties {target} to {source}, but the files hold two different tensors")
    return problems


def _read_shards(model: PreTrainedModel, path: Path, *, cpu_offload: bool) -> bool:
    """Load this rank's slices. Returns False, with nothing read, if that is not possible."""
    low, high = TESTED_TRANSFORMERS
    if not low <= tuple(int(part) for part in transformers.__version__.split(".")[:2]) < high:
        logger.warning("rank 0 reads all weights: transformers %s is not tested", transformers.__version__)
        return False
    # Import after the version check: untested versions may lack its private names.
    from fsdptrain.model.loading import shard_reader

    with raise_on_all_ranks(CheckpointError, f"--hf-checkpoint {path}"), quiet_transformers():
        files = weight_files(path)
        obstacle = shard_reader.needs_whole_tensors(model, files)
    require_same(obstacle, different_files(path))
    if obstacle:
        logger.warning("rank 0 reads all weights: %s", obstacle)
        return False
    shard_reader.read_shards(model, path, files, cpu_offload=cpu_offload)
    return True


def require_same_parameters(model: PreTrainedModel, path: Path) -> None:
    facts = [(name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters()]
    facts += [(name, tuple(b.shape), str(b.dtype)) for name, b in model.named_buffers()]
    require_same(hashlib.sha256(repr(facts).encode()).hexdigest(), different_files(path))
