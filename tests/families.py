"""The decoders of transformers, built tiny from their config classes: what the sweep goes through.

    config("olmoe")                   # by model_type
    save("olmoe", folder)             # a checkpoint with random weights, as save_pretrained writes it

`FAMILIES` is a table: kind of mixer -> model_type -> what is said to its config class beyond `SIZES`. Left out are
other names of the same class (internlm3 is a llama), models of other inputs than text, and those that cannot be built
small. A family that is missing here may well work: nothing in fsdptrain asks for a name.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel

from tests import zoo

SIZES: dict[str, Any] = {
    "vocab_size": zoo.VOCAB_SIZE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 512, "sliding_window": 16, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "mamba_n_heads": 8, "mamba_d_head": 16,
    "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 4,
    "state_size": 16, "time_step_rank": 4,
}  # fmt: skip
_MLA = {"num_key_value_heads": 4, "head_dim": 8} | {
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip
_GROUPS = {"n_group": 1, "topk_group": 1}
_SPARSE = {"mlp_layer_types": ["dense", "sparse"]}
_INDEXER = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 16}  # with few heads scores of 0 tie
_BOTH_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"]}
_LINEAR_AND_FULL = {"layer_types": ["linear_attention", "full_attention"]}
_BOTH_ROPES = {
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("sliding_attention", "full_attention")
    }
}
_PER_LAYER_INPUT = {"vocab_size_per_layer_input": zoo.VOCAB_SIZE, "hidden_size_per_layer_input": 8}
_INKLING = {
    "layer_types": ["hybrid_sliding", "hybrid"], "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2,
    "swa_head_dim": 16, "sliding_window_size": 16, "mlp_layer_types": ["dense", "sparse"],
}  # fmt: skip
_KIMI = {"linear_head_dim": 16, "linear_num_heads": 4}
_GEMMA3N = {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "intermediate_size": [96] * 4,
    "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0], "num_kv_shared_layers": 2, "laurel_rank": 8,
}  # fmt: skip
_MINIMAX_M3 = {
    "dense_intermediate_size": 96, "shared_intermediate_size": 32, "rotary_dim": 8, "index_head_dim": 16,
    "index_block_size": 8, "index_topk_blocks": 2,
}  # fmt: skip
_DEEPSEEK_V4 = {
    "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
    "mlp_layer_types": ["hash_moe", "moe"], "num_key_value_heads": 1, "q_lora_rank": 32, "o_lora_rank": 16,
    "o_groups": 2,
}  # fmt: skip
_NEMOTRON_H = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "mamba_num_heads": 8,
    "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 16, "moe_shared_expert_intermediate_size": 32,
}  # fmt: skip

# Options of a family beyond `SIZES`.
CHANGES: dict[str, dict[str, Any]] = {
    **{key: {"rotary_dim": 8} for key in ["codegen", "gptj"]},
    "ctrl": {"dff": 96, "n_positions": 512},
    **{key: {"n_positions": 512} for key in ["gpt2", "gpt_bigcode", "openai-gpt"]},
    "granite": {"logits_scaling": 4.0, "residual_multiplier": 0.5},
    **{key: {"head_dim": 16} for key in ["hunyuan_v1_dense", "ministral"]},
    "hyperclovax": {"logits_scaling": 0.5},
    "moshi": {"ffn_dim": 96},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "xglm": {"d_model": 64, "ffn_dim": 96, "attention_heads": 4, "num_layers": 2},
    **dict.fromkeys(
        ["cohere2", "cwm", "exaone4", "gemma3_text", "gemma4_unified_text", "olmo3", "gpt_oss"], _BOTH_WINDOWS
    ),
    "cohere_compass_text": _BOTH_WINDOWS | _BOTH_ROPES,
    "gemma3n_text": _GEMMA3N | _PER_LAYER_INPUT,
    "gemma4_text": _BOTH_WINDOWS | _PER_LAYER_INPUT | {"per_layer_config": {}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 16},
    **{key: {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0} for key in ["gemma2", "vaultgemma"]},
    "afmoe": {"num_dense_layers": 1},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2},
    "dots1": _GROUPS
    | {"num_experts_per_tok": 2, "num_key_value_heads": 2}
    | _BOTH_WINDOWS
    | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2},
    "exaone_moe": _SPARSE,
    **dict.fromkeys(["glm4_moe", "solar_open"], _GROUPS),
    "granitemoeshared": {"shared_intermediate_size": 32},
    "hunyuan_v1_moe": {"moe_topk": 2, "head_dim": 16},
    "jetmoe": {"kv_channels": 16},
    "laguna": {"num_attention_heads_per_layer": [4, 4], **_SPARSE},
    "llama4_text": {"intermediate_size_mlp": 96},
    "minimax_m3_vl_text": _MINIMAX_M3,
    **dict.fromkeys(["axk1", "glm4_moe_lite"], _MLA | _GROUPS),
    **dict.fromkeys(["axk2", "glm_moe_dsa"], _MLA | _GROUPS | _INDEXER),
    "deepseek_v2": _MLA | _GROUPS | {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "deepseek_v3": _MLA | {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    "deepseek_v32": _MLA | _INDEXER | _GROUPS | _SPARSE,
    "deepseek_v4": _DEEPSEEK_V4 | _INDEXER,
    "hy_v4": _MLA | _GROUPS | _INDEXER | _SPARSE,
    "longcat_flash": _MLA
    | {"num_layers": 1, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "moe_topk": 2, "zero_expert_num": 2},
    "minicpm3": _MLA | {"dim_model_base": 32},
    "youtu": _MLA,
    **dict.fromkeys(["inkling_text", "inkling2_text"], _INKLING),
    "bailing_hybrid": _MLA | {"num_expert_group": 1, "topk_group": 1} | _KIMI | _LINEAR_AND_FULL | _SPARSE,
    "kimi_linear": _MLA | _KIMI | _LINEAR_AND_FULL | _SPARSE,
    **dict.fromkeys(["minimax", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"], _LINEAR_AND_FULL),
    "rwkv": {"attention_hidden_size": 64},
    "xlstm": {"num_blocks": 2, "embedding_dim": 64, "num_heads": 4},
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {"mamba_d_ssm": 128},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "shared_intermediate_size": 32},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "nemotron_h": _NEMOTRON_H,
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "n_mamba_heads": 8, "mamba_ngroups": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "zaya": {"num_experts_per_tok": 1},
}

# Families that are trained, by the kind of mixer.
_NAMES = {
    "attention": (
        "llama apertus arcee biogpt bitnet bloom codegen cohere ctrl diffllama doge ernie4_5 falcon flint "
        "gemma glm glm4 gpt2 gpt_bigcode gpt_neox gpt_neox_japanese gptj granite helium hrm_text "
        "hunyuan_v1_dense hyperclovax jais2 mpt moshi nanochat nemotron olmo olmo2 openai-gpt opt persimmon "
        "phi phi3 qwen2 qwen3 seed_oss smollm3 stablelm xglm"
    ),
    "sliding window": (
        "cohere2 cohere_compass_text cwm exaone4 gemma3_text gemma3n_text gemma4_text gemma4_unified_text "
        "gpt_neo ministral ministral3 mistral olmo3 starcoder2"
    ),
    "softcap": "gemma2 vaultgemma",
    "sinks": "granite_swa gpt_oss",
    "experts": (
        "afmoe aria_text beam cohere2_moe dots1 ernie4_5_moe exaone_moe flex_olmo glm4_moe granitemoe "
        "granitemoe_swa granitemoeshared hunyuan_v1_moe hy_v3 jetmoe kolibri1 laguna llama4_text mellum "
        "mimo_v2_flash minimax_m2 minimax_m3_vl_text mixtral olmoe phimoe qwen2_moe qwen3_moe solar_open"
    ),
    "MLA": (
        "axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 glm4_moe_lite glm_moe_dsa hy_v4 "
        "longcat_flash minicpm3 youtu"
    ),
    "relative positions": "inkling_text inkling2_text",
    "linear attention": (
        "bailing_hybrid kimi_linear minimax olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next "
        "qwen4_exp_text rwkv xlstm"
    ),
    "Mamba": "bamba falcon_h1 falcon_mamba granitemoehybrid jamba mamba mamba2 nemotron_h zamba zamba2",
    "short convolution": "lfm2 lfm2_moe lfm3 recurrent_gemma zaya",
}
FAMILIES = {kind: {name: CHANGES.get(name, {}) for name in names.split()} for kind, names in _NAMES.items()}

# What cannot be trained, and must be refused before the first step.
REFUSED: dict[str, dict[str, Any]] = {
    "bert": {},
    "big_bird": {},
    "cpmant": {"dim_head": 16, "dim_ff": 96},
    "electra": {},
    "modernbert-decoder": _BOTH_WINDOWS,
    "prophetnet": {"num_encoder_layers": 2, "num_decoder_layers": 2, "decoder_ffn_dim": 96, "encoder_ffn_dim": 96},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [32, 32], "axial_pos_shape": [8, 64]},
    "rembert": {},
    "roberta": {},
    "roformer": {},
    "t5": {},
    "xlm": {},
    "xlnet": {"d_inner": 96},
}


def config(name: str, **more: Any) -> PreTrainedConfig:
    """The tiny configuration of the model_type `name`, with options `more`."""
    config_class = CONFIG_MAPPING[name]
    default = config_class().to_dict()
    names = config_class.attribute_map
    sizes = {names.get(k, k): v for k, v in SIZES.items() if default.get(names.get(k, k)) is not None}
    changes = next(members[name] for members in (REFUSED, *FAMILIES.values()) if name in members)
    return config_class(**sizes | changes | more)


def build(name: str, **changes: Any) -> PreTrainedModel:
    """A float32 model with all weights random."""
    torch.manual_seed(0)
    auto_class = AutoModelForSeq2SeqLM if name == "t5" else AutoModelForCausalLM
    model = auto_class.from_config(config(name, **changes), dtype=torch.float32)
    zoo.randomize(model, seed=0)
    return model


def tiny_config(name: str, **changes: Any) -> PreTrainedConfig:
    """Of the zoo where that has the family `name`, else of this module."""
    return zoo.config(name, **changes) if name in zoo.CONFIGS else config(name, **changes)


def tiny(name: str, **changes: Any) -> PreTrainedModel:
    """As `tiny_config`, with random weights."""
    return zoo.build(name, **changes) if name in zoo.CONFIGS else build(name, **changes)


def tiny_meta(name: str, **changes: Any) -> PreTrainedModel:
    """As `tiny_config`, on the meta device."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny_config(name, **changes))


def save(name: str, folder: Path, **changes: Any) -> None:
    build(name, **changes).save_pretrained(folder)
