"""Convert a transformers config to a megatron-core config. Every value is read; none is assumed.

Features of a model family that megatron-core does not support are rejected by name. The build report catches anything
that is missed here: it compares the built model with the config and with the transformers model.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedConfig

from fsdptrain.errors import ConfigError
from fsdptrain.megatron.config import MegatronConfig
from fsdptrain.megatron.cpu_shims import quiet_megatron
from fsdptrain.model.sizes import expert_choice, head_size

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

WHOLE = "transformers"  # --megatron-spec: whole layers of transformers
_REMEDY = f"use --backend fsdp, or --megatron-spec {WHOLE}"


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy of the config of the language model: megatron-core has no vision part."""
    text = copy.deepcopy(config.get_text_config())
    text.tie_word_embeddings = config.tie_word_embeddings  # decides, where both say it
    return text


def _experts(config: PreTrainedConfig) -> dict[str, Any]:
    choice = expert_choice(config)
    assert choice is not None, config.model_type
    return {
        "num_moe_experts": choice.num_experts,
        "moe_router_topk": choice.top_k,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
    }


def _softmax_experts(config: PreTrainedConfig) -> dict[str, Any]:
    """Qwen3-MoE: softmax over all experts, then the top k, optionally renormalized."""
    said = config.to_dict()  # Qwen3.5 sets neither key: experts in all layers, always renormalized
    dense = set(said.get("mlp_only_layers") or ())
    step = said.get("decoder_sparse_step") or 1
    layers = range(config.num_hidden_layers)
    return {
        **_experts(config),
        "moe_layer_freq": [int(i not in dense and (i + 1) % step == 0) for i in layers],
        "moe_router_pre_softmax": not said.get(
            "norm_topk_prob", True
        ),  # softmax over the top k alone equals renormalization
    }


def _shared_gate_experts(config: PreTrainedConfig) -> dict[str, Any]:
    """Qwen3-Next and Qwen3.5: as `_softmax_experts`, plus a gated expert that processes all tokens."""
    return _softmax_experts(config) | {
        "moe_shared_expert_intermediate_size": config.shared_expert_intermediate_size,
        "moe_shared_expert_gate": True,
    }


def _deepseek(config: PreTrainedConfig) -> dict[str, Any]:
    """DeepSeek-V3: a sigmoid router with a selection bias and expert groups. Its attention is that of transformers."""
    experts = _experts(config)
    if not config.norm_topk_prob or experts["moe_router_topk"] < 2:
        raise ConfigError(f"--backend megatron: norm_topk_prob off, or one expert a token, is not built: {_REMEDY}")
    return {
        **experts,
        "moe_layer_freq": [int(i >= config.first_k_dense_replace) for i in range(config.num_hidden_layers)],
        "moe_shared_expert_intermediate_size": config.moe_intermediate_size * config.n_shared_experts,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,  # as under FSDP: loaded and exported, not trained
        "moe_router_num_groups": config.n_group if config.n_group > 1 else None,
        "moe_router_group_topk": config.topk_group if config.n_group > 1 else None,
        "moe_router_topk_scaling_factor": config.routed_scaling_factor,
    }


@dataclass(frozen=True)
class Family:
    """Differences of a `model_type` from a plain decoder with RMSNorm, rotary attention and a gated MLP."""

    special: Callable[[PreTrainedConfig], dict[str, Any]] = lambda _: {}
    qk_norm: bool = False
    qkv_bias: bool = False
    wrapped: bool = False  # uses the attention module of transformers: see hf_spec.py
    gated: bool = False  # attention with a gate, norms by 1 + weight, and linear attention of transformers


FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
    "qwen3_moe": Family(_softmax_experts, qk_norm=True),
    "deepseek_v3": Family(_deepseek, wrapped=True),
    "qwen3_next": Family(_shared_gate_experts, qk_norm=True, gated=True),
    "qwen3_5_text": Family(qk_norm=True, gated=True),
    "qwen3_5_moe_text": Family(_shared_gate_experts, qk_norm=True, gated=True),
}


def family_of(config: PreTrainedConfig) -> Family:
    """Look up the family of a config. Another one is a plain decoder, for the layers of a user."""
    return FAMILIES.get(config.model_type, Family())


def is_whole(config: PreTrainedConfig, spec: str | None) -> bool:
    """Return whether whole layers are of transformers (whole.py): by --megatron-spec, or in a family not listed."""
    return spec == WHOLE or (spec is None and config.model_type not in FAMILIES)


# Independent of the model and of the parallel sizes.
_ALWAYS: dict[str, Any] = {
    "normalization": "RMSNorm",
    "activation_func": F.silu,
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "attention_softmax_in_fp32": True,
    "init_method_std": 0.0,  # every weight is loaded
    "perform_initialization": False,
    "calculate_per_token_loss": True,  # gradients are sums: loss_weights hold the global denominator
    "apply_rope_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
    "gradient_accumulation_fusion": False,
}


def transformer_config(
    config: PreTrainedConfig,
    megatron: MegatronConfig,
    *,
    dtype: torch.dtype,
    has_engine: bool,
    on_cpu: bool,
    recompute: bool = False,
    deterministic: bool = False,
) -> "TransformerConfig":
    """Build the config of GPTModel. has_engine: Transformer Engine is available.

    Raises ConfigError for models and parallel sizes that are not supported.
    """
    with quiet_megatron():
        from megatron.core.transformer import TransformerConfig

    whole, family = is_whole(config, megatron.spec), family_of(config)
    if megatron.spec is None and not whole:
        _refuse_unknown(config)
    layers: dict[str, Any] = {"num_attention_heads": 1}
    if not whole:
        layers = {
            "ffn_hidden_size": config.to_dict().get("intermediate_size", config.hidden_size),  # absent: only experts
            "num_attention_heads": config.num_attention_heads,
            "num_query_groups": config.num_key_value_heads,
            "kv_channels": head_size(config),
            "layernorm_epsilon": config.rms_norm_eps,
            "add_qkv_bias": family.qkv_bias,
            "qk_layernorm": family.qk_norm,
            "attention_output_gate": family.gated,
            "layernorm_zero_centered_gamma": family.gated,
            **family.special(config),
        }
    values = _ALWAYS | {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "tensor_model_parallel_size": megatron.tensor_parallel,
        "pipeline_model_parallel_size": megatron.pipeline_parallel,
        "virtual_pipeline_model_parallel_size": megatron.virtual_pipeline,
        "overlap_p2p_comm": megatron.virtual_pipeline is not None,
        "batch_p2p_comm": megatron.virtual_pipeline is None,  # else interleaved packs of different lengths are mixed up
        "num_layers_in_first_pipeline_stage": megatron.first_stage_layers,
        "num_layers_in_last_pipeline_stage": megatron.last_stage_layers,
        "expert_model_parallel_size": megatron.expert_parallel,
        "sequence_parallel": megatron.tensor_parallel > 1,
        "moe_token_dispatcher_type": "alltoall",
        "variable_seq_lengths": megatron.pipeline_parallel > 1,
        **layers,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "deterministic_mode": deterministic,
        "use_cpu_initialization": on_cpu,
    }
    if recompute:
        values |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if "num_moe_experts" in values:
        exact_router = dtype == torch.float32 or "moe_router_score_function" in values  # as in transformers
        values |= {
            "moe_grouped_gemm": has_engine,
            "moe_permute_fusion": False,
            "moe_router_dtype": "fp32" if exact_router else None,
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "expert_tensor_parallel_size": megatron.tensor_parallel,
        }
    _refuse_stages(config.num_hidden_layers, megatron)
    if not whole:
        _refuse_split(config, megatron, values, on_cpu=on_cpu)
    elif max(megatron.tensor_parallel, megatron.expert_parallel) > 1:
        raise ConfigError(
            "--megatron-tensor-parallel and --megatron-expert-parallel split layers of megatron-core, and this "
            f"{config.model_type} has whole layers of transformers: remove them"
        )
    with quiet_megatron():
        return TransformerConfig(**values)


def rotary_options(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the rotary arguments of GPTModel.

    Raises ConfigError for a scaling type, or scaling parameters, that megatron-core does not support.
    """
    rope = dict(config.to_dict().get("rope_parameters") or {})
    if family_of(config).wrapped or "rope_theta" not in rope:  # several, or none: of the layers of a user
        return {"position_embedding_type": "none"}
    options = {
        "position_embedding_type": "rope",
        "rotary_base": rope["rope_theta"],
        "rotary_percent": rope.get("partial_rotary_factor", 1.0),
    }
    if rope["rope_type"] == "default":
        return options
    fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    if rope["rope_type"] == "llama3" and all(math.isclose(rope[key], value) for key, value in fixed.items()):
        return options | {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}
    raise ConfigError(f"--backend megatron does not build rope_parameters {rope}: {_REMEDY}")


def _refuse_unknown(config: PreTrainedConfig) -> None:
    """Reject options that would be computed differently than in transformers."""
    said = config.to_dict()
    odd = {
        "hidden_act": said.get("hidden_act", "silu") != "silu",
        "mlp_bias": bool(said.get("mlp_bias")),
        "attention_bias": bool(said.get("attention_bias")),
        "sliding_window": said.get("sliding_window") is not None and said.get("use_sliding_window", True),
    }
    for key, found in odd.items():
        if found:
            raise ConfigError(f"--backend megatron does not build {key} = {said[key]}: {_REMEDY}")


def _refuse_split(config: PreTrainedConfig, megatron: MegatronConfig, values: dict[str, Any], *, on_cpu: bool) -> None:
    """Reject parallel sizes that the model does not allow. values: options of the TransformerConfig."""
    tensor, experts, choice = megatron.tensor_parallel, megatron.expert_parallel, expert_choice(config)
    widths = ["ffn_hidden_size"] * (0 in values.get("moe_layer_freq", [0]))
    widths += [name for name in ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size") if name in values]
    counts = [
        ("tensor", tensor, "key-value heads", values["num_query_groups"]),
        ("tensor", tensor, "attention heads", values["num_attention_heads"]),
        *(("tensor", tensor, "columns of each MLP", values[name]) for name in widths),
        *([("expert", experts, "experts", choice.num_experts)] if choice else []),
    ]
    for flag, size, what, count in counts:
        if count % size:
            raise ConfigError(f"--megatron-{flag}-parallel {size} must divide the {count} {what}: lower it")
    if config.vocab_size <= (tensor - 1) * -(-config.vocab_size // tensor):
        raise ConfigError(
            f"--megatron-tensor-parallel {tensor} leaves a process without a part of the vocabulary of "
            f"{config.vocab_size}: lower it"
        )
    if choice is None and experts > 1:
        raise ConfigError(f"--megatron-expert-parallel: a {config.model_type} has no experts: remove it")
    if on_cpu and tensor > 1 and experts > 1:
        raise ConfigError(
            "--megatron-expert-parallel with --megatron-tensor-parallel gathers unequal parts, which gloo cannot: on "
            "CPUs leave one out"
        )


def _refuse_stages(num_layers: int, megatron: MegatronConfig) -> None:
    sizes = {"first": megatron.first_stage_layers, "last": megatron.last_stage_layers}
    given = {f"--megatron-{name}-stage-layers": size for name, size in sizes.items() if size is not None}
    stages, left = megatron.pipeline_parallel - len(given), num_layers - sum(given.values())
    if left < stages or (left % stages if stages else left):
        words = " and ".join(f"{flag} {size}" for flag, size in given.items())
        what = f"{words}: {left} layers for the other {stages} stages, which get as many each: change them"
        even = f"--megatron-pipeline-parallel {stages} must divide the {num_layers} layers: lower it, or set"
        raise ConfigError(what if given else f"{even} --megatron-first-stage-layers and ...-last-...")
    for size in {*given.values(), left // stages if stages else 0}:
        if size % (megatron.virtual_pipeline or 1):
            flag = f"--megatron-virtual-pipeline {megatron.virtual_pipeline}"
            raise ConfigError(f"{flag} must divide the {size} layers of a stage: change it, or remove it")
