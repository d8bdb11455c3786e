"""Combinations that cannot work or have no effect are refused in one line with the fix; repaired ones are accepted."""

from typing import Any

import pytest

from fsdptrain.config import Config
from fsdptrain.config.checks import check_data_options
from fsdptrain.config.keys import all_keys
from fsdptrain.errors import ConfigError

SFT = {"algorithm": "sft"}
OFF_POLICY = {"global_batch_size": 64}
URLS = {"rollout_engine": "vllm-server", "rollout_urls": ["http://127.0.0.1:8000"]}
STARTED = {"rollout_engine": "vllm-server", "rollout_num_servers": 2}
ADAPTER = {"lora_rank": 8, "lora_sync": "adapter"}
MEGATRON = {"backend": "megatron"}
SELECTIVE = {"gradient_checkpointing": True, "gradient_checkpointing_kind": "selective"}
TEACHER, SERVER = {"opd_teacher": "y"}, "http://127.0.0.1:8000"
TENSOR, EXPERT = {"tensor_parallel_size": 2}, {"expert_parallel_size": 2}
# untested combinations with split layers or experts; and with split layers alone
BESIDE_BOTH = [
    {"lora_rank": 8},
    {"image_key": "image"},
    {"compile": True},
    SELECTIVE,
    {"offload_activations": True},
    {"load_strategy": "rank0"},
    {"fp16": True, "bf16": False},
    {"fsdp_cpu_offload": True},
    {"async_save": True},
]
BESIDE_TENSOR = [
    SFT,
    {"router_replay": "rollout", "rollout_engine": "vllm"},
    {"router_aux_loss_coef": 0.1},
    {"rollout_top_p": 0.9},
    {"rollout_top_k": 20},
    {"rollout_min_p": 0.1},
]

# (rejected flags, text in the error line, flags that fix it; None: no short fix)
CORE_AND_FEATURES = [
    *(
        (
            {**other, **TENSOR},
            ["--tensor-parallel-size", all_keys()[next(iter(other))].flag[:15]],
            dict.fromkeys(TENSOR, 1),
        )
        for other in BESIDE_BOTH + BESIDE_TENSOR
    ),
    *(
        (
            {**other, **EXPERT},
            ["--expert-parallel-size", all_keys()[next(iter(other))].flag[:15]],
            dict.fromkeys(EXPERT, 1),
        )
        for other in BESIDE_BOTH
    ),
    ({"profile_steps": "190:201"}, ["--profile-steps 190:201", "200 steps"], {"num_rollout": 201}),
    ({"profile_steps": "5:3"}, ["--profile-steps 5:3", "FIRST:LAST"], {"profile_steps": "3:5"}),
    ({"algorithm": "opd"}, ["--algorithm opd", "--opd-teacher"], TEACHER),
    ({"advantage_estimator": "none"}, ["--advantage-estimator none", "--opd-teacher"], TEACHER),
    ({"opd_kl_coef": 0.5}, ["--opd-kl-coef", "--opd-teacher"], TEACHER),
    ({**TEACHER, **SFT}, ["--opd-teacher", "--algorithm sft"], {"algorithm": "opd"}),
    ({**TEACHER, "opd_beta": 0.1}, ["--opd-beta", "--opd-loss jsd"], {"opd_loss": "jsd"}),
    ({**TEACHER, "rollout_top_p": 0.9}, ["--opd-teacher", "--rollout-top-p 1"], {"rollout_top_p": 1.0}),
    ({**TEACHER, "image_key": "image"}, ["--opd-teacher", "--image-key"], {"image_key": None}),
    ({**TEACHER, "algorithm": "gspo"}, ["--opd-loss token", "--loss gspo"], {"opd_loss": "jsd"}),
    ({**TEACHER, **TENSOR}, ["--opd-teacher", "--tensor-parallel-size"], {"opd_teacher": SERVER}),
    ({**TEACHER, "opd_teacher_timeout": 5.0}, ["--opd-teacher-timeout", "no server"], {"opd_teacher": SERVER}),
    (
        {"opd_teacher": SERVER, "rollout_temperature": 0.7},
        ["--opd-teacher", "--rollout-temperature 0.7"],
        {"rollout_temperature": 1.0},
    ),
    ({"opd_teacher": SERVER, "opd_loss": "jsd"}, ["--opd-teacher", "--opd-top-k"], {"opd_top_k": 8}),
    (
        {**TEACHER, "opd_loss": "jsd", "epochs_per_rollout": 2},
        ["--opd-loss jsd", "--epochs-per-rollout 2"],
        {"epochs_per_rollout": 1},
    ),
    ({"hf_checkpoint": ""}, ["--hf-checkpoint", "Qwen/Qwen3-4B"], {"hf_checkpoint": "x"}),
    ({"resume": ""}, ["--resume"], {"resume": "never"}),
    ({"fp16": True, "bf16": True}, ["--fp16", "--no-bf16"], {"bf16": False}),
    ({"apply_chat_template": False, "chat_template_kwargs": {"a": 1}}, ["--chat-template-kwargs"],
     {"chat_template_kwargs": {}}),
    *(
        ({key: value}, [all_keys()[key].flag, "--environment"], {"environment": "calculator"})
        for key, value in [
            ("environment_kwargs", {"a": 1}),
            ("max_turns", 2),
            ("max_observation_len", 9),
            ("environment_timeout", 1.0),
            ("environment_workers", 2),
            ("prompt_data", "environment"),
        ]
    ),
    ({"eval_prompt_data": "environment"}, ["--eval-prompt-data", "held out"], {"eval_prompt_data": None}),
    *(
        ({key: value}, [all_keys()[key].flag, "without --gradient-checkpointing"], {"gradient_checkpointing": True})
        for key, value in [("gradient_checkpointing_kind", "selective"), ("gradient_checkpointing_every", 2)]
    ),
    *(
        ({**SELECTIVE, key: True}, [all_keys()[key].flag, "-kind full"], {"gradient_checkpointing_kind": "full"})
        for key in ("offload_activations", "compile")
    ),
    ({"optimizer": "adam"}, ["--optimizer", "'adamw'"], {"optimizer": "adamw"}),
    ({"sgd_momentum": 0.9}, ["--sgd-momentum", "--optimizer sgd"], {"optimizer": "sgd"}),
    *(
        ({key: value}, [all_keys()[key].flag, "--optimizer muon"], {"optimizer": "muon"})
        for key, value in [("muon_lr", 1e-4), ("muon_momentum", 0.9), ("muon_adjust_lr", "original")]
    ),
    ({"optimizer": "muon", "muon_lr": 1e-4, "lr": 0.0}, ["--muon-lr", "--lr"], {"lr": 1e-5}),
    *(
        ({"optimizer": "sgd", key: 0.5}, [all_keys()[key].flag, "--optimizer sgd"], {"optimizer": "adamw"})
        for key in ("adam_beta1", "adam_beta2", "adam_eps")
    ),
    ({"optimizer": "muon", "offload_optimizer": True}, ["--offload-optimizer", "--optimizer muon"],
     {"optimizer": "adamw"}),
    ({"optimizer": "muon", **TENSOR}, ["--optimizer muon", "--tensor-parallel-size"], {"optimizer": "adamw"}),
    ({"optimizer": "adamw8bit", "fsdp_cpu_offload": True}, ["--optimizer adamw8bit", "--fsdp-cpu-offload"],
     {"fsdp_cpu_offload": False}),
    ({"optimizer": "muon", "backend": "megatron"}, ["--optimizer muon", "--backend megatron"], {"backend": "fsdp"}),
    ({"offload_optimizer_step": "device"}, ["--offload-optimizer-step", "without --offload-optimizer"],
     {"offload_optimizer": True}),
    ({"offload_optimizer": True, "fsdp_cpu_offload": True}, ["--offload-optimizer", "with --fsdp-cpu-offload"],
     {"fsdp_cpu_offload": False}),
    *(
        ({key: value}, [all_keys()[key].flag, "--lora-rank"], {"lora_rank": 8})
        for key, value in [
            ("lora_alpha", 64),
            ("lora_targets", ["attention"]),
            ("lora_export", "merged"),
        ]
    ),
    ({"fp8_recipe": "tensorwise"}, ["--fp8-recipe", "without --fp8"], {"fp8": ["training"]}),
    ({"fp8_skip": ["down_proj"]}, ["--fp8-skip", "without --fp8"], {"fp8": ["training"]}),
    ({"fp8": ["training", "training"]}, ["--fp8 training training", "twice"], {"fp8": ["training"]}),
    *(
        ({"fp8": ["training"], **other}, ["--fp8 training", all_keys()[next(iter(other))].flag], {"fp8": []})
        for other in ({"lora_rank": 8}, {"liger": True}, {"fp16": True, "bf16": False}, TENSOR, EXPERT)
    ),
    ({"fp8": ["rollout"]}, ["--fp8 rollout", "--rollout-engine vllm"], {"rollout_engine": "vllm"}),
    (
        {"fp8": ["rollout"], "fp8_recipe": "tensorwise", "rollout_engine": "vllm"},
        ["--fp8-recipe", "without --fp8 training"],
        {"fp8": ["training", "rollout"]},
    ),
    (
        {"fp8": ["rollout"], "rollout_engine": "vllm", "rollout_engine_args": {"quantization": "fp8"}},
        ["--fp8 rollout", "--rollout-engine-args quantization"],
        {"fp8": []},
    ),
    (
        {"fp8": ["rollout"], "rollout_engine": "vllm-server", "rollout_urls": ["http://127.0.0.1:1"]},
        ["--fp8 rollout", "--quantization fp8"],
        {"fp8": []},
    ),
    *(
        ({key: True}, [all_keys()[key].flag, "--lora-rank"], {"lora_rank": 8})
        for key in ("load_in_4bit", "load_in_8bit")
    ),
    *(
        ({"lora_rank": 8, "load_in_4bit": True, key: value}, ["--load-in-4bit", all_keys()[key].flag], {key: default})
        for key, value, default in [
            ("load_in_8bit", True, False),
            ("compile", True, False),
            ("liger", True, False),
            ("fsdp_cpu_offload", True, False),
        ]
    ),
    ({"lora_rank": 8, "load_in_4bit": True, "ref_load": "other", "kl_loss_coef": 0.1},
     ["--load-in-4bit", "--ref-load"], {"ref_load": None}),
    ({"lora_rank": 8, "load_in_4bit": True, "lora_sync": "adapter", "rollout_engine": "vllm"},
     ["--load-in-4bit", "--lora-sync"], {"lora_sync": "merged"}),
    ({"lora_rank": 8, "lora_dropout": 0.1}, ["--lora-dropout", "reinforcement", "--algorithm sft"], SFT),
    ({"lora_rank": 8, "lora_targets": ["q_proj", "q_proj"]}, ["--lora-targets", "twice"], {"lora_targets": "q_proj"}),
    ({"rollout_max_response_len": 8192}, ["--rollout-max-response-len 8192", "--max-tokens-per-gpu 8192"],
     {"max_tokens_per_gpu": 9000}),
    ({"rollout_max_prompt_len": 7000}, ["--rollout-max-prompt-len 7000", "--overlong-samples drop"],
     {"overlong_samples": "drop"}),
    ({"rollout_max_batch_tokens": 100}, ["--rollout-max-batch-tokens 100"], {"rollout_max_batch_tokens": 8192}),
    ({"rollout_engine": "vllm", "rollout_max_batch_tokens": 9000}, ["--rollout-max-batch-tokens"],
     {"rollout_engine": "hf"}),
    ({"lr_decay_style": "linear", "min_lr": 1.0}, ["--min-lr", "--lr"], {"min_lr": 1e-7}),
    ({"lr_warmup_iters": 5, "lr_warmup_init": 1.0}, ["--lr-warmup-init"], {"lr_warmup_init": 1e-8}),
    ({"lr_warmup_iters": 5, "lr_warmup_fraction": 0.1}, ["--lr-warmup-iters", "--lr-warmup-fraction"],
     {"lr_warmup_iters": 0}),
    ({"lr_warmup_init": 1e-8}, ["--lr-warmup-init", "--lr-warmup-iters"], {"lr_warmup_iters": 5}),
    ({"min_lr": 1e-7}, ["--min-lr", "--lr-decay-style"], {"lr_decay_style": "cosine"}),
    ({"lr_decay_iters": 50}, ["--lr-decay-iters"], {"lr_decay_style": "linear"}),
    ({"lr_wsd_decay_iters": 5}, ["--lr-wsd-decay-iters", "WSD"], {"lr_decay_style": "WSD"}),
    ({"lr_wsd_decay_style": "linear"}, ["--lr-wsd-decay-style"], {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 5}),
    ({"lr_decay_style": "WSD"}, ["--lr-wsd-decay-iters", "e.g. 20"], {"lr_wsd_decay_iters": 20}),
    ({"lr_decay_style": "WSD", "lr_wsd_decay_iters": 500}, ["--lr-wsd-decay-iters 500", "200"],
     {"lr_wsd_decay_iters": 200}),
    ({"lr_decay_style": "cosine", "lr_warmup_iters": 200}, ["--lr-warmup-iters 200"], {"lr_warmup_iters": 199}),
    ({"keep_last": 0, "save_interval": 5}, ["--save-interval", "--keep-last 0"], {"keep_last": 1}),
    ({"keep_last": 0, "async_save": True}, ["--async-save", "--keep-last 0"], {"keep_last": 1}),
    ({"save_interval": 0, "async_save": True}, ["--async-save", "--save-interval 0"], {"save_interval": 5}),
    ({"eval_interval": 0, "eval_size": 64}, ["--eval-size", "--eval-interval 0"], {"eval_interval": 5}),
    ({"eval_interval": 0, "eval_prompt_data": "a.jsonl"}, ["--eval-prompt-data"], {"eval_interval": 5}),
    ({"eval_size": 0, "eval_interval": 5}, ["--eval-interval", "--eval-size 0"], {"eval_size": 5}),
    ({"log_to": ["wand"]}, ["--log-to", "'wand'", "wandb"], {"log_to": ["wandb"]}),
    ({"log_to": ["console", "console"]}, ["--log-to", "twice"], {"log_to": ["console"]}),
    ({"log_project": "p"}, ["--log-project", "trackio"], {"log_to": ["trackio"]}),
    ({"liger": True, "compile": True}, ["--liger", "--compile", "leave one of them out"], {"compile": False}),
    ({"liger": True, "expert_parallel_size": 2}, ["--liger", "--expert-parallel-size 2"], {"liger": False}),
    ({"liger": True, **TENSOR}, ["--liger", "--tensor-parallel-size 2"], {"liger": False}),
    *(
        ({"context_parallel_size": 2, **values}, ["--context-parallel-size", flag], repair)
        for values, flag, repair in [
            ({"compile": True}, "--compile", {"compile": False}),
            (
                {"gradient_checkpointing": True, "gradient_checkpointing_kind": "selective"},
                "--gradient-checkpointing-kind selective",
                {"gradient_checkpointing_kind": "full"},
            ),
            ({"offload_activations": True}, "--offload-activations", {"offload_activations": False}),
            ({"attn_implementation": "flash_attention_2"}, "flash_attention_2", {"attn_implementation": "varlen"}),
        ]
    ),
    ({"context_parallel_size": 2, "rollout_max_response_len": 16384},
     ["--rollout-max-response-len 16384", "--max-tokens-per-gpu 8192 x --context-parallel-size 2"],
     {"context_parallel_size": 4, "rollout_max_batch_tokens": 65536}),
    *(
        ({"prefix_sharing": "on", **values}, ["--prefix-sharing", flag], {"prefix_sharing": "auto"})
        for values, flag in [
            ({"image_key": "image"}, "--image-key"),
            ({"layout": "padded"}, "--layout padded"),
            ({"attn_implementation": "flash_attention_2"}, "--attn-implementation flash_attention_2"),
            (TENSOR, "--tensor-parallel-size 2"),
        ]
    ),
    ({"reward_timeout": 301}, ["--dist-timeout 1800", "3 x --reward-timeout is 903 s"], {"reward_timeout": 300}),
    ({"reward_timeout": 200, "max_staleness": 1, "mismatch_correction": "tis"},
     ["--dist-timeout 1800", "for each of 2 rollouts (--max-staleness 1) is 450 s", "3 x --reward-timeout is 600 s"],
     {"dist_timeout": 2400}),
    ({"max_restarts": 1, "save_interval": 0}, ["--max-restarts", "--save-interval"], {"save_interval": 5}),
    (ADAPTER, ["--lora-sync", "--rollout-engine vllm or vllm-server", "merged"], {"rollout_engine": "vllm"}),
    ({**ADAPTER, **URLS}, ["--lora-sync adapter", "--rollout-urls", "--rollout-num-servers"], {"lora_sync": "merged"}),
    ({**ADAPTER, **STARTED, "max_staleness": 1, "mismatch_correction": "tis"}, ["--lora-sync", "--max-staleness 1"],
     None),
    ({"train_vision": True}, ["--train-vision", "--image-key"], {"image_key": "i"}),
    ({"image_key": "i", "train_vision": True, "lora_rank": 8}, ["--train-vision", "--lora-rank"], {"lora_rank": 0}),
    ({"image_key": "i", "apply_chat_template": False}, ["--image-key", "--no-apply-chat-template"],
     {"image_key": None}),
    ({"image_key": "i", "environment": "a:B"}, ["--image-key i", "--environment a:B"], {"environment": None}),
    ({"image_key": "i", "rollout_engine": "vllm"}, ["--image-key", "--rollout-engine vllm"], {"rollout_engine": "hf"}),
]  # fmt: skip
ALGORITHM = [
    *(
        ({key: value}, [all_keys()[key].flag, "--algorithm sft"], SFT)
        for key, value in [("sft_format", "text"), ("sft_loss_on", "all"), ("sft_eval_generate", True)]
    ),
    ({**SFT, "sft_eval_generate": True, "eval_interval": 0}, ["--sft-eval-generate", "--eval-interval"],
     {"eval_interval": 5}),
    ({**SFT, "n_samples_per_prompt": 4}, ["--n-samples-per-prompt", "sft"], {"algorithm": "grpo"}),
    ({**SFT, "kl_loss_coef": 0.1}, ["--kl-loss-coef", "sft"], {"algorithm": "grpo"}),
    ({**SFT, "entropy_coef": 0.1}, ["--entropy-coef", "sft"], {"algorithm": "grpo"}),
    ({**SFT, "rollout_temperature": 0.7}, ["--rollout-temperature", "sft"], {"algorithm": "grpo"}),
    ({**SFT, "max_unscored_fraction": 0.5}, ["--max-unscored-fraction", "sft"], {"algorithm": "grpo"}),
    *(
        ({**SFT, key: value}, [all_keys()[key].flag, "never generates"], {"sft_eval_generate": True})
        for key, value in [
            ("reward", "exact"),
            ("environment", "calculator"),
            ("rollout_engine", "hf"),
            ("rollout_max_response_len", 7),
            ("rollout_max_batch_tokens", 20_000),
            ("log_num_samples", 2),
        ]
    ),
    ({**SFT, "rollout_batch_size": 8, "global_batch_size": 4}, ["--rollout-batch-size"], {"rollout_batch_size": 4}),
    ({"n_samples_per_prompt": 1}, ["--n-samples-per-prompt", "at least 2"], {"n_samples_per_prompt": 2}),
    ({"n_samples_per_prompt": 1}, ["--n-samples-per-prompt"], {"advantage_estimator": "my.advantages:baseline"}),
    ({"kl_loss_type": "k1"}, ["--kl-loss-type", "--kl-loss-coef"], {"kl_loss_coef": 0.001}),
    ({"ref_load": "y"}, ["--ref-load", "--kl-loss-coef"], {"kl_reward_coef": 0.001}),
    ({"ref_update_interval": 5}, ["--ref-update-interval", "--kl-reward-coef"], {"kl_reward_coef": 0.001}),
    ({"ref_dtype": "bfloat16"}, ["--ref-dtype", "--kl-loss-coef"], {"kl_reward_coef": 0.001}),
    ({"ref_dtype": "bfloat16", "kl_loss_coef": 0.1, "lora_rank": 4}, ["--ref-dtype", "adapter"], {"ref_load": "y"}),
    ({"ref_dtype": "bfloat16", "kl_loss_coef": 0.1, "fsdp_cpu_offload": True},
     ["--ref-dtype bfloat16", "--fsdp-cpu-offload", "leave one of them out"], {"fsdp_cpu_offload": False}),
    ({"ref_dtype": "bfloat16", "kl_loss_coef": 0.1, "backend": "megatron"}, ["--ref-dtype", "megatron"],
     {"backend": "fsdp"}),
    ({**SFT, "skip_zero_advantage": False}, ["--skip-zero-advantage", "sft"], {"algorithm": "grpo"}),
    ({"ref_update_interval": 1, "kl_loss_coef": 0.1},
     ["--ref-update-interval 1", "KL divergence 0", "--global-batch-size below 256"], {"ref_update_interval": 2}),
    ({"kl_reward_coef": 0.1, "mask_truncated": True}, ["--kl-reward-coef 0.1", "--mask-truncated", "--kl-loss-coef"],
     {"mask_truncated": False}),
    ({"kl_reward_coef": 0.1, "kl_loss_type": "k1"}, ["--kl-loss-type", "--kl-loss-coef"], {"kl_loss_coef": 0.001}),
    ({"kl_loss_coef": 0.1, "kl_reward_type": "k3"}, ["--kl-reward-type", "without --kl-reward-coef"],
     {"kl_reward_coef": 0.001}),
    ({"mismatch_rejection": "seq_mean_k3"}, ["--mismatch-rejection-max", "0.01"], {"mismatch_rejection_max": 0.01}),
    ({"mismatch_rejection_max": 0.1}, ["--mismatch-rejection-max", "--mismatch-rejection:", "e.g. seq_mean_k3"],
     {"mismatch_rejection": "token_k1", "use_rollout_logprobs": True}),
    ({"algorithm": "prime_rl", "mismatch_rejection": "token_k1", "mismatch_rejection_max": 0.1},
     ["--mismatch-rejection", "prime_rl"], {"algorithm": "grpo"}),
    *(
        ({**SFT, key: value}, [all_keys()[key].flag, "sft"], {"algorithm": "grpo"})
        for key, value in [
            ("kl_reward_coef", 0.1),
            ("rollout_top_p", 0.9),
            ("rollout_top_k", 5),
            ("rollout_min_p", 0.1),
        ]
    ),
    ({"eps_clip_high": 0.28}, ["--eps-clip-high", "--global-batch-size below 256"], OFF_POLICY),
    ({"eps_clip": 0.1}, ["--eps-clip ", "ratio is always 1"], {"use_rollout_logprobs": True}),
    ({"eps_clip_c": 3.0}, ["--eps-clip-c"], OFF_POLICY),
    ({"use_opsm": True}, ["--use-opsm", "ratio is always 1"], OFF_POLICY),
    ({**OFF_POLICY, "opsm_delta": 0.1}, ["--opsm-delta", "--use-opsm"], {"use_opsm": True}),
    ({**OFF_POLICY, "loss": "cispo", "eps_clip": 0.1}, ["--eps-clip ", "--loss cispo"], {"loss": "grpo"}),
    ({**OFF_POLICY, "algorithm": "gspo", "is_cap_high": 2.0}, ["--is-cap-high", "--loss gspo"], {"algorithm": "cispo"}),
    ({"algorithm": "cispo", "is_cap_high": 2.0}, ["--is-cap-high", "ratio is always 1"], OFF_POLICY),
    ({**OFF_POLICY, "sapo_tau_pos": 2.0}, ["--sapo-tau-pos", "--loss grpo"], {"loss": "sapo"}),
    ({"prime_rl_kl_coef": 0.1}, ["--prime-rl-kl-coef", "--loss grpo"], {"algorithm": "prime_rl"}),
    ({"algorithm": "prime_rl", "use_rollout_logprobs": True}, ["--use-rollout-logprobs", "prime_rl"],
     {"algorithm": "grpo"}),
    ({"algorithm": "prime_rl", "mismatch_correction": "tis"}, ["--mismatch-correction", "prime_rl"],
     {"algorithm": "grpo"}),
    ({"mismatch_high": 3.0}, ["--mismatch-high", "--mismatch-correction"], {"mismatch_correction": "tis"}),
    ({"max_staleness": 1}, ["--max-staleness 1", "--mismatch-correction tis"], {"mismatch_correction": "tis"}),
    ({"max_staleness": 1}, ["--loss grpo", "--use-rollout-logprobs"], {"use_rollout_logprobs": True}),
    ({"max_staleness": 1, "algorithm": "gspo"}, ["--max-staleness 1", "--loss gspo"], {"algorithm": "prime_rl"}),
    ({**SFT, "max_staleness": 1}, ["--max-staleness", "sft"], {"algorithm": "prime_rl"}),
    ({**STARTED, "max_staleness": 2, "algorithm": "prime_rl", "router_replay": "rollout"},
     ["--router-replay rollout", "--max-staleness 2"], {"max_staleness": 0}),
    ({"mismatch_correction": "tis", "use_rollout_logprobs": True},
     ["--mismatch-correction", "--use-rollout-logprobs"], {"use_rollout_logprobs": False}),
    ({"use_unbiased_kl": True}, ["--use-unbiased-kl", "--kl-loss-coef"], {"kl_loss_coef": 0.001}),
    ({"loss": "gpso"}, ["--loss", "'gpso'", "gspo", "package.module:function"], {"loss": "gspo"}),
    ({"loss": "sft"}, ["--loss sft", "--algorithm sft"], {"loss": "my.losses:mine"}),
    ({**SFT, "loss": "grpo"}, ["--loss", "--algorithm sft"], {"loss": "my.losses:mine"}),
    ({**SFT, "dynamic_sampling": True}, ["--dynamic-sampling ", "sft"], {"algorithm": "grpo"}),
    ({"min_group_spread": 0.1}, ["--min-group-spread", "without --dynamic-sampling"], {"dynamic_sampling": True}),
    ({"dynamic_sampling_max_rounds": 3}, ["--dynamic-sampling-max-rounds"], {"algorithm": "dapo"}),
    ({"algorithm": "dapo", "dynamic_sampling": False, "min_group_spread": 0.1}, ["--min-group-spread"],
     {"dynamic_sampling": True}),
    ({"eval_interval": 0, "pass_threshold": 0.5}, ["--pass-threshold", "evaluated"], {"eval_interval": 1}),
    ({"eval_size": 0, "pass_threshold": 0.5}, ["--pass-threshold", "--eval-interval"], {"eval_size": 8}),
    ({"advantage_estimator": "grppo"},
     ["--advantage-estimator", "'grppo'", "did you mean 'grpo'", "package.module:function"],
     {"advantage_estimator": "my.advantages:mine"}),
    ({**SFT, "advantage_scale": "batch"}, ["--advantage-scale", "sft"], {"algorithm": "grpo"}),
    ({"overlong_buffer": 64}, ["--overlong-buffer", "--overlong-penalty"], {"overlong_penalty": 1.0}),
    ({"overlong_penalty": 1.0, "overlong_buffer": 4096},
     ["--overlong-buffer 4096", "--rollout-max-response-len 2048"], {"overlong_buffer": 2048}),
    ({**SFT, "overlong_penalty": 1.0}, ["--overlong-penalty", "sft"], {"algorithm": "grpo"}),
    ({**SFT, "mask_truncated": True}, ["--mask-truncated", "sft"], {"algorithm": "grpo"}),
    ({**SFT, "mismatch_correction": "tis"}, ["--mismatch-correction", "sft"], {"algorithm": "grpo"}),
    ({**SFT, "router_replay": "rollout"}, ["--router-replay", "sft"], {"algorithm": "grpo"}),
    ({"router_replay": "scoring"}, ["--router-replay", "--router-replay rollout"], OFF_POLICY),
    ({"router_replay": "scoring"}, ["--router-replay"], {"kl_reward_coef": 0.1}),  # which scores it on-policy too
    ({**OFF_POLICY, "router_replay": "scoring", "use_rollout_logprobs": True},
     ["--router-replay", "the policy is not scored"], {"router_replay": "rollout"}),
    ({"router_aux_loss_coef": -0.1}, ["--router-aux-loss-coef", "`config`", "-0.1"],
     {"router_aux_loss_coef": "config"}),
    ({"global_batch_size": 100}, ["--global-batch-size 100", "32", "8", "256", "e.g. 64"], OFF_POLICY),
    ({"global_batch_size": 512}, ["--global-batch-size 512", "e.g. 256"], OFF_POLICY),
    ({**OFF_POLICY, "steps_per_rollout": 3}, ["--steps-per-rollout 3", "make 4 steps of 64"], {"steps_per_rollout": 4}),
    ({"steps_per_rollout": 3, "epochs_per_rollout": 2},
     ["--steps-per-rollout 3", "multiple of --epochs-per-rollout 2", "e.g. 4"], {"steps_per_rollout": 4}),
    ({"steps_per_rollout": 257}, ["--steps-per-rollout 257", "= 256 samples", "at most 256"],
     {"steps_per_rollout": 256}),
    ({**SFT, "steps_per_rollout": 2}, ["--steps-per-rollout", "sft"], {"algorithm": "grpo"}),
    ({**SFT, "epochs_per_rollout": 2}, ["--epochs-per-rollout", "sft"], {"algorithm": "grpo"}),
]  # fmt: skip
SERVERS = [
    *(
        ({key: value}, [all_keys()[key].flag, "--rollout-engine vllm-server"])
        for key, value in [
            ("rollout_urls", ["http://a:1"]),
            ("rollout_num_servers", 2),
            ("rollout_server_python", "python"),
            ("rollout_api_key_env", "KEY"),
            ("rollout_allow_public_servers", True),
            ("weight_transfer", "gloo"),
            ("weight_sync_dir", "here"),
            ("update_weight_buffer_size", 1000),
            ("weight_sync_timeout", 5.0),
            ("server_start_timeout", 5.0),
            ("min_servers", 2),
        ]
    ),
    ({"rollout_engine": "vllm-server"}, ["--rollout-urls", "--rollout-num-servers", "one of the two"]),
    ({**URLS, "rollout_num_servers": 1}, ["--rollout-urls", "--rollout-num-servers", "one of the two"]),
    *(
        ({**URLS, key: value}, [all_keys()[key].flag, "run already"])
        for key, value in [
            ("rollout_server_python", "python"),
            ("rollout_engine_args", {"max_num_seqs": 8}),
            ("rollout_kv_cache_gib", 1.0),
            ("server_start_timeout", 5.0),
        ]
    ),
    *(
        ({**STARTED, key: value}, [all_keys()[key].flag, "--rollout-urls"])
        for key, value in [("rollout_api_key_env", "KEY"), ("rollout_allow_public_servers", True)]
    ),
    *(
        ({**URLS, "rollout_urls": [url]}, ["--rollout-urls", "is no address of a server"])
        for url in [
            *("http://a:b", "http://a:99999", "http://a:-1", "http://a:0", "http://[::1", "http://[x]:80"),
            *("http://a\n:80", "http://a :80", "http://a..b:80", f"http://{'a' * 64}:80", "http://a:80#x"),
        ]
    ),
    ({**URLS, "rollout_urls": ["127.0.0.1:8000"]}, ["--rollout-urls '127.0.0.1:8000'", "http://"]),
    ({**URLS, "rollout_urls": ["http://user@a:1"]}, ["--rollout-urls"]),
    ({**URLS, "rollout_urls": ["http://a:1", "http://a:1/"]}, ["--rollout-urls", "twice"]),
    ({**STARTED, "min_servers": 3}, ["--min-servers 3", "2 servers"]),
    ({**STARTED, "weight_sync_timeout": 900.0}, ["--dist-timeout 1800", "--weight-sync-timeout"]),
    ({**URLS, "weight_sync_timeout": 850.0},
     ["--dist-timeout 1800", "1820 s", "--weight-sync-timeout", "one that comes back"]),
    ({"rollout_engine": "hf", "rollout_timeout": 60.0}, ["--rollout-timeout", "--rollout-engine hf", "vllm"]),
    ({**URLS, "rollout_max_batch_tokens": 4096}, ["--rollout-max-batch-tokens", "vllm-server"]),
]  # fmt: skip
WITH_MEGATRON = [
    ({"tensor_parallel_size": 2}, ["--tensor-parallel-size", "--megatron-tensor-parallel"],
     {"tensor_parallel_size": 1}),
    ({"expert_parallel_size": 2}, ["--megatron-expert-parallel"], {"expert_parallel_size": 1}),
    ({"fsdp_cpu_offload": True}, ["--fsdp-cpu-offload", "--backend megatron"], {"fsdp_cpu_offload": False}),
    ({"lora_rank": 8}, ["--lora-rank 8", "--backend megatron"], {"lora_rank": 0}),
    ({"async_save": True}, ["--async-save"], {"async_save": False}),
    ({"router_replay": "scoring"}, ["--router-replay"], {"router_replay": "off"}),
    ({"prefix_sharing": "on"}, ["--prefix-sharing"], {"prefix_sharing": "auto"}),
    ({"megatron_context_parallel": 2, "megatron_moe_dispatcher": "allgather"},
     ["--megatron-moe-dispatcher allgather", "--megatron-context-parallel", "alltoall"],
     {"megatron_moe_dispatcher": "alltoall"}),
    ({"megatron_sequence_parallel": True}, ["--megatron-tensor-parallel above 1"], {"megatron_tensor_parallel": 2}),
    ({"megatron_pipeline_parallel": 2, "megatron_moe_dispatcher": "allgather"},
     ["--megatron-moe-dispatcher allgather", "alltoall"], {"megatron_moe_dispatcher": "alltoall"}),
    ({"megatron_tensor_parallel": 2, "rollout_top_k": 20}, ["--rollout-top-k"], {"rollout_top_k": None}),
]  # fmt: skip
REFUSED: list[tuple[dict[str, Any], list[str], dict[str, Any] | None]] = [
    *CORE_AND_FEATURES,
    *ALGORITHM,
    *((values, named, None) for values, named in SERVERS),
    *(({**MEGATRON, "bf16": False, **values}, named, repair) for values, named, repair in WITH_MEGATRON),
]


def ids(table: list) -> list[str]:
    return [" ".join(named) for _, named, *_ in table]


@pytest.mark.parametrize(("values", "named", "repair"), REFUSED, ids=ids(REFUSED))
def test_what_cannot_work_is_one_line_with_the_fix(values, named, repair):
    values = {"hf_checkpoint": "x", **values}
    with pytest.raises(ConfigError) as caught:
        Config(**values)
    line = str(caught.value)
    assert "\n" not in line
    assert [part for part in named if part not in line] == []
    if repair is not None:
        Config(**{**values, **repair})


# For named data; Python callers may pass data of their own.
DATA_REFUSED = [
    ({"input_key": "question"}, ["--input-key", "reasoning_gym"], {"prompt_data": "a.jsonl"}),
    ({"label_key": "question"}, ["--label-key"], {"prompt_data": "a.jsonl"}),
    ({"metadata_key": "question"}, ["--metadata-key"], {"prompt_data": "gsm8k"}),
    ({"prompt_split": "test"}, ["--prompt-split"], {"prompt_data": "gsm8k"}),
    ({"prompt_data": "a.jsonl", "data_size": 10}, ["--data-size"], {"prompt_data": "reasoning_gym:spell_backward"}),
    ({"prompt_data": "a.jsonl?x=1", "prompt_split": "test"}, ["--prompt-split"], {"prompt_data": "folder"}),
    ({"algorithm": "sft", "sft_format": "text"}, ["--sft-format", "no columns"], {"prompt_data": "a.jsonl"}),
    ({"image_key": "images"}, ["--image-key", "no columns"], {"prompt_data": "a.jsonl"}),
]  # fmt: skip


@pytest.mark.parametrize(("values", "named", "repair"), DATA_REFUSED, ids=ids(DATA_REFUSED))
def test_options_that_the_data_cannot_use_are_refused(values, named, repair):
    config = Config(**{"hf_checkpoint": "x", **values})
    with pytest.raises(ConfigError) as caught:
        check_data_options(config)
    assert [part for part in named if part not in str(caught.value)] == []
    check_data_options(Config(**{"hf_checkpoint": "x", **values, **repair}))


def test_every_condition_of_a_rule_names_an_option_or_a_property():
    conditions = [c for key in all_keys().values() for rule in key.rules for c in rule.conditions]
    names = {condition.key for condition in conditions}
    assert len(names) > 20
    properties = {f"@{name}" for name, value in vars(Config).items() if isinstance(value, property)}
    assert names <= set(all_keys()) | properties
