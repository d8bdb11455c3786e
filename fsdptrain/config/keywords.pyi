"""Types of the keywords of `Config`. Made by docgen/generate_keywords.py."""

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from fsdptrain.config.section import Section

# fmt: off

class Keywords(TypedDict, total=False):
    """Sections, then all options by flat key. docs/configuration.md describes them."""

    model: Section | Mapping[str, Any]
    data: Section | Mapping[str, Any]
    reward: str | list[str] | Section | Mapping[str, Any]
    environment: str | list[str] | Section | Mapping[str, Any]
    algorithm: Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo", "sapo", "prime_rl", "reinforce", "rloo", "reinforce++_baseline", "opd", "sft"] | Section | Mapping[str, Any]  # noqa: E501
    shaping: Section | Mapping[str, Any]
    selection: Section | Mapping[str, Any]
    sft: Section | Mapping[str, Any]
    optim: Section | Mapping[str, Any]
    batch: Section | Mapping[str, Any]
    fsdp: Section | Mapping[str, Any]
    rollout: Section | Mapping[str, Any]
    sync: Section | Mapping[str, Any]
    ref: Section | Mapping[str, Any]
    run: Section | Mapping[str, Any]
    log: Section | Mapping[str, Any]
    launch: Section | Mapping[str, Any]
    lora: Section | Mapping[str, Any]
    quantized_base: Section | Mapping[str, Any]
    vision: Section | Mapping[str, Any]
    router: Section | Mapping[str, Any]
    model_parallel: Section | Mapping[str, Any]
    context_parallel: Section | Mapping[str, Any]
    prefix_sharing: bool | Section | Mapping[str, Any]
    activation_memory: Section | Mapping[str, Any]
    compile: bool | Section | Mapping[str, Any]
    liger: bool | Section | Mapping[str, Any]
    distillation: Section | Mapping[str, Any]
    fp8: bool | Section | Mapping[str, Any]
    vllm: Section | Mapping[str, Any]
    servers: Section | Mapping[str, Any]
    megatron: Section | Mapping[str, Any]
    hf_checkpoint: str
    backend: Literal["fsdp", "megatron"]
    trust_remote_code: bool
    attn_implementation: Literal["auto", "flash_attention_2", "flash_attention_3", "varlen", "sdpa"]
    layout: Literal["auto", "packed", "padded"]
    bf16: bool | Literal["auto"]
    fp16: bool
    logprob_chunk_size: int
    strict: bool
    deterministic_mode: bool
    prompt_data: str
    input_key: str
    label_key: str
    reward_key: str | None
    environment_key: str | None
    apply_chat_template: bool
    chat_template_kwargs: dict[str, Any]
    system_prompt: str
    eval_prompt_data: str | list[str]
    eval_set_options: dict[str, Any]
    eval_size: int | None
    max_unscored_fraction: float
    reward_timeout: float | None
    reward_workers: int | None
    pass_threshold: float
    environment_command: str | None
    environment_kwargs: dict[str, Any]
    max_turns: int
    max_observation_len: int
    environment_timeout: float | None
    environment_workers: int
    loss: str
    n_samples_per_prompt: int
    advantage_estimator: str
    advantage_scale: Literal["auto", "group", "batch", "whiten", "none"]
    eps_clip: float
    eps_clip_high: float | None
    eps_clip_c: float | None
    is_cap_high: float
    sapo_tau_pos: float
    sapo_tau_neg: float
    use_opsm: bool
    opsm_delta: float
    loss_aggregation: Literal["token_mean", "sequence_mean", "fixed_length", "sequence_sum"]
    kl_loss_coef: float
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"]
    use_unbiased_kl: bool
    entropy_coef: float
    use_rollout_logprobs: bool
    mismatch_correction: Literal["none", "tis", "tis_sequence", "mis", "mis_sequence", "icepop"]
    mismatch_low: float | None
    mismatch_high: float | None
    overlong_penalty: float
    overlong_buffer: int | None
    mask_truncated: bool
    dynamic_sampling: bool
    dynamic_sampling_max_rounds: int
    sft_loss_on: Literal["assistant", "last", "all"]
    optimizer: str
    lr: float
    min_lr: float
    lr_decay_style: Literal["constant", "linear", "cosine"]
    lr_decay_iters: int | None
    lr_warmup_iters: int
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_eps: float
    muon_lr: float | None
    clip_grad: float
    freeze: str | list[str]
    lr_scale: dict[str, float]
    offload_optimizer: bool
    max_tokens_per_gpu: int
    overlong_samples: Literal["error", "drop", "truncate"]
    global_batch_size: int | None
    epochs_per_rollout: int
    fsdp_cpu_offload: bool
    fsdp_replicate_size: int
    fsdp_reshard_after_forward: bool
    rollout_engine: str
    rollout_batch_size: int
    rollout_max_prompt_len: int | None
    rollout_max_response_len: int
    rollout_temperature: float
    rollout_top_p: float
    rollout_top_k: int | None
    rollout_min_p: float
    rollout_stop: str | list[str]
    rollout_stop_token_ids: list[int]
    rollout_max_batch_tokens: int
    rollout_shuffle: bool
    rollout_seed: int
    max_staleness: int
    offload_train: bool
    ref_load: str | None
    output_dir: str
    num_rollout: int
    seed: int
    resume: str
    save_interval: int
    keep_last: int
    keep_best: int
    keep_every: int
    export_every_save: bool
    async_save: bool
    export: bool
    export_dtype: Literal["auto", "source", "bfloat16", "float32"]
    push_to_hub: str | None
    eval_interval: int
    n_samples_per_eval_prompt: int
    eval_temperature: float
    eval_greedy: bool
    eval_metric: str | None
    early_stop_evals: int
    stop_when: str | None
    profile_steps: str | None
    record_rollouts: bool
    replay_rollouts: str | None
    verify_weight_sync: bool
    log_to: str | list[str]
    log_project: str
    log_run_name: str | None
    log_num_samples: int
    nproc_per_node: int | None
    dist_timeout: int
    dry_run: bool | Literal["full"]
    lora_rank: int
    lora_alpha: int
    lora_rslora: bool
    lora_targets: str | list[str]
    lora_modules_to_save: str | list[str]
    lora_init: str | None
    lora_export: Literal["adapter", "merged", "both"]
    load_in_4bit: bool
    image_key: str | None
    train_vision: bool
    router_replay: Literal["off", "scoring", "rollout"]
    tensor_parallel_size: int
    expert_parallel_size: int
    context_parallel_size: int
    gradient_checkpointing: bool
    offload_activations: bool
    opd_teacher: str | None
    opd_loss: Literal["token", "jsd"]
    opd_kl_coef: float
    opd_beta: float
    opd_top_k: int
    rollout_engine_args: dict[str, Any]
    rollout_kv_cache_gib: float | None
    rollout_timeout: float
    rollout_urls: str | list[str]
    rollout_num_servers: int | None
    rollout_server_python: str | None
    weight_transfer: Literal["file", "nccl"]
    weight_sync_dir: str | None
    weight_sync_timeout: float
    megatron_tensor_parallel: int
    megatron_pipeline_parallel: int
    megatron_first_stage_layers: int | None
    megatron_last_stage_layers: int | None
    megatron_virtual_pipeline: int | None
    megatron_expert_parallel: int
    megatron_spec: str | None
    megatron_bridge: Literal["own", "mbridge"]
