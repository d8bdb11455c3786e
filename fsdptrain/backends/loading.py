"""From a checkpoint to a sharded model that scores packs: the order in which its parts are put together."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from transformers import PreTrainedModel

from fsdptrain import platform
from fsdptrain.backends.experts import Experts
from fsdptrain.config import Config, ModelConfig
from fsdptrain.errors import ConfigError
from fsdptrain.fsdp.mesh import Meshes
from fsdptrain.fsdp.wrap import shard_model
from fsdptrain.models.activation_offload import enable_activation_offload
from fsdptrain.models.attention import resolve_attention
from fsdptrain.models.checkpointing import enable_gradient_checkpointing
from fsdptrain.models.collective import together
from fsdptrain.models.compiling import check_compiler, compile_layers
from fsdptrain.models.context import Context
from fsdptrain.models.dealing import check_dealing
from fsdptrain.models.loading import build_meta_model, load_weights
from fsdptrain.models.lora import Adapters, add_adapters
from fsdptrain.models.materialize import store_in
from fsdptrain.models.policy import install_policy_forward
from fsdptrain.models.prefix_probe import require_prefixes, structural_obstacle
from fsdptrain.models.processor import ImageProcessor
from fsdptrain.models.recurrent import GatheredMixer, gather_around
from fsdptrain.models.rotation import check_longest
from fsdptrain.models.selective_check import check_selective
from fsdptrain.models.splitting import split_model
from fsdptrain.models.structure import freeze_vision
from fsdptrain.models.transfers import Transfers
from fsdptrain.models.vision import Vision


def load_model(
    config: Config,
    path: Path,
    meshes: Meshes,
    *,
    with_adapters: bool = True,
    experts: Experts | None = None,
    before_load: Callable[[PreTrainedModel], None] | None = None,
    processor: ImageProcessor | None = None,
) -> tuple[PreTrainedModel, Adapters | None]:
    """The sharded model of `path` with its weights, whose forward scores packs. The order of these calls matters.

    Of a run that trains an adapter, weights are stored in the compute dtype: they stay as they are.
    """
    compute_dtype: torch.dtype = getattr(torch, config.compute_dtype_name)
    stored = compute_dtype if config.lora.rank else torch.float32
    own = config.needs_own_attention
    attention = resolve_attention(config.model.attn_implementation, platform.device_type(), ours=own)
    model = build_meta_model(path, trust_remote_code=config.model.trust_remote_code, attn_implementation=attention)
    check_longest(model.config, config.longest_sequence)
    if config.batch.prefix_sharing == "on":
        require_prefixes(structural_obstacle(model))
    if not config.model.train_vision:
        freeze_vision(model)
    adapters = None
    if config.lora.rank and with_adapters:
        with together(ConfigError, "--lora-targets"):
            adapters = add_adapters(model, config.lora)
    without_adapters = nullcontext if adapters is None else adapters.detached
    with without_adapters():
        store_in(model, stored)
    if before_load is not None:
        before_load(model)
    context, gathered = _split(model, meshes, config)
    with together(ConfigError, "--compile, --gradient-checkpointing-kind"):
        _prepare_layers(model, config.model)
    replay = experts.replay(model) if experts else None
    if config.model.offload_activations:
        enable_activation_offload(model, Transfers(platform.local_device()))
    vision = Vision(model, processor.blank) if processor else None
    install_policy_forward(
        model,
        chunk_size=config.model.logprob_chunk_size,
        replay=replay,
        vision=vision,
        context=context,
        gathered=gathered,
    )
    shard_model(
        model,
        meshes.dense,
        compute_dtype=compute_dtype,
        cpu_offload=config.fsdp.cpu_offload,
        reshard_after_forward=config.fsdp.reshard_after_forward,
        prefetch=config.fsdp.prefetch,
        runs_tower=vision is not None,
        expert_shards=meshes.expert_shards,
    )
    with without_adapters():
        offload = config.fsdp.cpu_offload
        load_weights(model, path, strategy=config.model.load_strategy, cpu_offload=offload, dtype=stored)
    if adapters is not None:
        adapters.finish(seed=config.run.seed, cpu_offload=config.fsdp.cpu_offload)
    return model, adapters


def _split(model: PreTrainedModel, meshes: Meshes, config: Config) -> tuple[Context | None, list[GatheredMixer]]:
    """Over the axes within a replica, before FSDP; what the forward needs to know of them. May raise ConfigError."""
    context, gathered = None, []
    if meshes.context is not None:
        context = Context.of(meshes.context)
        with together(ConfigError, "--context-parallel-size"):
            gathered = [gather_around(mixer, context) for mixer in check_dealing(model, config.parallel)]
    if meshes.tensor is not None:
        with together(ConfigError, "--tensor-parallel-size, --expert-parallel-size"):
            split_model(model, tensor=meshes.tensor, experts=meshes.experts)
    return context, gathered


def _prepare_layers(model: PreTrainedModel, config: ModelConfig) -> None:
    """Compiled, then recomputed. ConfigError where this machine lacks a compiler, or the model does not allow it."""
    if config.compile:
        check_compiler(platform.device_type())
        compile_layers(model)
    if config.gradient_checkpointing:
        kind, every = config.gradient_checkpointing_kind, config.gradient_checkpointing_every
        if kind == "selective":
            check_selective(model.config, trust_remote_code=config.trust_remote_code)
        enable_gradient_checkpointing(model, kind=kind, every=every)
