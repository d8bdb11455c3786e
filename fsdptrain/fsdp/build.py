"""Build a sharded policy from a checkpoint."""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.config.rules import Fact
from fsdptrain.enabled_features import Features
from fsdptrain.fsdp.mesh import Meshes
from fsdptrain.fsdp.wrap import shard_model
from fsdptrain.model.attention.attention import resolve_attention
from fsdptrain.model.attention.rope import check_longest
from fsdptrain.model.loading.materialize import store_in
from fsdptrain.model.loading.meta import build_meta_model, load_weights
from fsdptrain.model.policy import install_policy_forward
from fsdptrain.model.structure import freeze_vision


def meta_policy(config: Config, path: Path, features: Features) -> PreTrainedModel:
    """Build the policy on meta, whole. Collective."""
    attention = resolve_attention(
        config.model.attn_implementation, platform.device_type(), needs_package_attention=config.has(Fact.OWN_ATTENTION)
    )
    model = build_meta_model(path, trust_remote_code=config.model.trust_remote_code, attn_implementation=attention)
    if not config.has(Fact.TRAINS_TOWER):
        freeze_vision(model)
    for feature in features:
        feature.add_parameters(model)
    if config.optim.freeze or config.optim.lr_scale:
        from fsdptrain.fsdp.trained import choose_trained

        choose_trained(model, config.optim)
    return model


def load_model(
    config: Config,
    path: Path,
    meshes: Meshes,
    *,
    features: Features,
    stored_dtype: torch.dtype | None = None,
    before_load: Callable[[PreTrainedModel], None] | None = None,
) -> PreTrainedModel:
    """Build, shard and load the model of `path`. Its forward computes the logprobs of packs. Collective.

    Args:
        stored_dtype: dtype of the parameters between steps, overriding that of the configuration.
        before_load: called with the whole model on meta, before it is split and allocated.
    """
    compute_dtype: torch.dtype = getattr(torch, config.compute_dtype_name)
    model = meta_policy(config, path, features)
    check_longest(model.config, config.longest_sequence)
    default = compute_dtype if config.has(Fact.FROZEN_WEIGHTS) else torch.float32
    stored = torch.promote_types(stored_dtype or default, compute_dtype)
    with features.without():
        store_in(model, stored)
    if before_load is not None:
        before_load(model)
    for feature in features:
        feature.transform_model(model, meshes)
    install_policy_forward(model, chunk_size=config.model.logprob_chunk_size, features=features)
    shard_model(
        model,
        meshes.dense,
        compute_dtype=compute_dtype,
        cpu_offload=config.fsdp.cpu_offload,
        reshard_after_forward=config.fsdp.reshard_after_forward,
        runs_tower=config.has(Fact.RUNS_TOWER),
        expert_shards=meshes.expert_shards,
    )
    with features.without():
        load_weights(model, path, cpu_offload=config.fsdp.cpu_offload)
    for feature in features:
        feature.after_load(model)
    return model
