"""From a checkpoint to a sharded model that scores packs: the order in which its parts are put together."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from transformers import PreTrainedModel

from fsdptrain import platform
from fsdptrain.config import Config, ModelConfig
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import ConfigError
from fsdptrain.features.activation_memory.checkpointing import enable_gradient_checkpointing
from fsdptrain.features.activation_memory.offload import enable_activation_offload
from fsdptrain.features.activation_memory.selective_check import check_selective
from fsdptrain.features.compile.layers import check_compiler, compile_layers
from fsdptrain.features.context_parallel.checks import check_dealing
from fsdptrain.features.context_parallel.recurrent import GatheredMixer, gather_around
from fsdptrain.features.context_parallel.ulysses import UlyssesGroup
from fsdptrain.features.lora.adapters import Adapters, add_adapters
from fsdptrain.features.model_parallel.split import split_model
from fsdptrain.features.moe.controller import MoEController
from fsdptrain.features.prefix_sharing.probe import require_prefixes, structural_obstacle
from fsdptrain.features.vision.processor import ImageProcessor
from fsdptrain.features.vision.tower import Vision
from fsdptrain.fsdp.mesh import Meshes
from fsdptrain.fsdp.transfers import Transfers
from fsdptrain.fsdp.wrap import shard_model
from fsdptrain.model.attention.attention import resolve_attention
from fsdptrain.model.attention.rope import check_longest
from fsdptrain.model.loading.materialize import store_in
from fsdptrain.model.loading.meta import build_meta_model, load_weights
from fsdptrain.model.policy import install_policy_forward
from fsdptrain.model.structure import freeze_vision


def load_model(
    config: Config,
    path: Path,
    meshes: Meshes,
    *,
    with_adapters: bool = True,
    experts: MoEController | None = None,
    before_load: Callable[[PreTrainedModel], None] | None = None,
    processor: ImageProcessor | None = None,
) -> tuple[PreTrainedModel, Adapters | None]:
    """The sharded model of `path` with its weights, whose forward scores packs. The order of these calls matters.

    Of a run that trains an adapter, weights are stored in the compute dtype: they stay as they are.
    """
    compute_dtype: torch.dtype = getattr(torch, config.compute_dtype_name)
    stored = compute_dtype if config.lora.rank else torch.promote_types(compute_dtype, torch.float32)
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
        with raise_on_all_ranks(ConfigError, "--lora-targets"):
            adapters = add_adapters(model, config.lora)
    without_adapters = nullcontext if adapters is None else adapters.detached
    with without_adapters():
        store_in(model, stored)
    if before_load is not None:
        before_load(model)
    context, gathered = _split(model, meshes, config)
    with raise_on_all_ranks(ConfigError, "--compile, --gradient-checkpointing-kind"):
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


def _split(model: PreTrainedModel, meshes: Meshes, config: Config) -> tuple[UlyssesGroup | None, list[GatheredMixer]]:
    """Over the axes within a replica, before FSDP; what the forward needs to know of them. May raise ConfigError."""
    context, gathered = None, []
    if meshes.context is not None:
        context = UlyssesGroup.of(meshes.context)
        with raise_on_all_ranks(ConfigError, "--context-parallel-size"):
            gathered = [gather_around(mixer, context) for mixer in check_dealing(model, config.parallel)]
    if meshes.tensor is not None:
        with raise_on_all_ranks(ConfigError, "--tensor-parallel-size, --expert-parallel-size"):
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
