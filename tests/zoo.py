"""Nineteen small causal language models, one of each family: random weights, real transformers classes.

    model = build("gemma2", seed=3)      # float32, on the CPU
    for name in ARCHITECTURES: ...

Every parameter is random, the norms and biases too, which the stock initialization leaves at one and zero: a weight
that was lost, swapped or left at its initial value shows in the logits. The vocabulary is that of
`testing.tiny_tokenizer`.
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

VOCAB_SIZE = 264
HIDDEN = 64
_TOKENS = {"vocab_size": VOCAB_SIZE, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
_BASE = {
    **_TOKENS, "hidden_size": HIDDEN, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
TOWER = {"hidden_size": 32, "intermediate_size": 48, "patch_size": 4}
QWEN_TOWER: dict[str, Any] = {
    **TOWER, "depth": 2, "num_heads": 2, "in_channels": 3, "out_hidden_size": 64, "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}  # fmt: skip
_LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0} | {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0} | {
    "truncate": False,
    "original_max_position_embeddings": 128,
}
_HEAD = {"head_dim": 16}
_SCALES = {"logits_scaling": 4.0, "residual_multiplier": 0.5}
_WINDOW = {"head_dim": 16, "sliding_window": 16}
_GEMMA = {**_WINDOW, "query_pre_attn_scalar": 16, "tie_word_embeddings": True}
_TOP_2 = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
_SLIDING, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"
_MLA = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
_GROUPS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
GDN = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip


def _config(config_class: Callable[..., PreTrainedConfig], **overrides: Any) -> Callable[..., PreTrainedConfig]:
    def make(**changes: Any) -> PreTrainedConfig:
        return config_class(**{**_BASE, **overrides, **changes})

    return make


def _gpt2(**changes: Any) -> PreTrainedConfig:
    own = {"n_embd": HIDDEN, "n_layer": 2, "n_head": 4, "n_inner": 128, "n_positions": 512}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return hf.GPT2Config(**{**_TOKENS, **own, **quiet, "tie_word_embeddings": True, **changes})


CONFIGS: dict[str, Callable[..., PreTrainedConfig]] = {
    "llama": _config(hf.LlamaConfig),
    "llama3_rope": _config(hf.LlamaConfig, rope_parameters=_LLAMA3_ROPE),
    "qwen2": _config(hf.Qwen2Config, tie_word_embeddings=True),
    "qwen3": _config(hf.Qwen3Config, **_HEAD),
    "qwen3_moe": _config(hf.Qwen3MoeConfig, **_HEAD, **_TOP_2, num_experts=6, decoder_sparse_step=1),
    "mixtral": _config(hf.MixtralConfig, num_local_experts=4, num_experts_per_tok=2),
    "mistral": _config(hf.MistralConfig, sliding_window=16),
    "gemma2": _config(hf.Gemma2Config, **_GEMMA, attn_logit_softcapping=5.0, final_logit_softcapping=3.0),
    "gemma3": _config(hf.Gemma3TextConfig, **_GEMMA, num_hidden_layers=3, layer_types=[_SLIDING, _FULL, _SLIDING]),
    "gpt_oss": _config(
        hf.GptOssConfig,
        **_WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters=_YARN,
        layer_types=[_SLIDING, _FULL],
    ),
    "qwen3_next": _config(
        hf.Qwen3NextConfig,
        **{**GDN, **_HEAD, **_TOP_2},
        num_hidden_layers=4,
        num_experts=4,
        shared_expert_intermediate_size=48,
        layer_types=[_LINEAR, _LINEAR, _LINEAR, _FULL],
    ),
    "glm4": _config(hf.Glm4Config, **_HEAD),
    "phi3": _config(hf.Phi3Config),
    "phi": _config(hf.PhiConfig),
    "deepseek_v3": _config(
        hf.DeepseekV3Config, **{**_MLA, **_GROUPS}, num_key_value_heads=4, moe_intermediate_size=48, n_shared_experts=1
    ),
    "olmo2": _config(hf.Olmo2Config),
    "granite": _config(hf.GraniteConfig, **_SCALES, embedding_multiplier=2.0, attention_multiplier=0.2),
    "gpt2": _gpt2,
    "cohere": _config(hf.CohereConfig, logit_scale=0.25, tie_word_embeddings=True),
}
ARCHITECTURES = tuple(CONFIGS)
MOE = ("qwen3_moe", "mixtral", "gpt_oss", "qwen3_next", "deepseek_v3")


def config(name: str, **changes: Any) -> PreTrainedConfig:
    """The small configuration of the family `name`, with `changes`."""
    return CONFIGS[name](**changes)


def build(name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random float32 model of the family `name`, on the CPU, in eval mode."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config(name, **changes), dtype=torch.float32)
    randomize(model, seed)
    return model.eval()


def meta(name: str, **changes: Any) -> PreTrainedModel:
    """The float32 model of the family `name` on the meta device, with stock attention."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config(name, **changes), dtype=torch.float32)


@torch.no_grad()
def randomize(model: PreTrainedModel, seed: int) -> None:
    """Add noise to every parameter."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_(0.2 * noise if parameter.dim() == 1 else 0.05 * noise)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # a persistent buffer, trained by its own rule
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
