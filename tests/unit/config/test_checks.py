"""Combinations that cannot work, or have no effect, are refused with the way out; their repaired forms are not."""

import pytest

from fsdptrain.config import Config, check_world_size
from fsdptrain.config.checks import check_data_options
from fsdptrain.config.keys import all_keys
from fsdptrain.errors import ConfigError
from tests.unit.config.refusals import SFT, assert_refused

SELECTIVE = {"gradient_checkpointing": True, "gradient_checkpointing_kind": "selective"}
TENSOR, EXPERT = {"tensor_parallel_size": 2}, {"expert_parallel_size": 2}
# what was not proven beside split layers or experts; and beside layers alone
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

# (what is refused, what the line names, what repairs it)
REFUSED = [
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
    ({"hf_checkpoint": ""}, ["--hf-checkpoint", "Qwen/Qwen3-4B"], {"hf_checkpoint": "x"}),
    ({"fp16": True, "bf16": True}, ["--fp16", "--no-bf16"], {"bf16": False}),
    (
        {"apply_chat_template": False, "chat_template_kwargs": {"a": 1}},
        ["--chat-template-kwargs"],
        {"chat_template_kwargs": {}},
    ),
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
    (
        {"offload_optimizer_step": "device"},
        ["--offload-optimizer-step", "without --offload-optimizer"],
        {"offload_optimizer": True},
    ),
    (
        {"offload_optimizer": True, "fsdp_cpu_offload": True},
        ["--offload-optimizer", "with --fsdp-cpu-offload"],
        {"fsdp_cpu_offload": False},
    ),
    *(
        ({key: value}, [all_keys()[key].flag, "--lora-rank"], {"lora_rank": 8})
        for key, value in [
            ("lora_alpha", 64),
            ("lora_targets", ["attention"]),
            ("lora_export", "merged"),
        ]
    ),
    ({"lora_rank": 8, "lora_dropout": 0.1}, ["--lora-dropout", "reinforcement", "--algorithm sft"], SFT),
    ({"lora_rank": 8, "lora_targets": ["q_proj", "q_proj"]}, ["--lora-targets", "twice"], {"lora_targets": "q_proj"}),
    (
        {"rollout_max_response_len": 8192},
        ["--rollout-max-response-len 8192", "--max-tokens-per-gpu 8192"],
        {"max_tokens_per_gpu": 9000},
    ),
    ({"rollout_max_prompt_len": 7000}, ["--rollout-max-prompt-len 7000", "--overlong drop"], {"overlong": "drop"}),
    ({"rollout_max_batch_tokens": 100}, ["--rollout-max-batch-tokens 100"], {"rollout_max_batch_tokens": 8192}),
    (
        {"rollout_engine": "vllm", "rollout_max_batch_tokens": 9000},
        ["--rollout-max-batch-tokens"],
        {"rollout_engine": "hf"},
    ),
    ({"lr_decay_style": "linear", "min_lr": 1.0}, ["--min-lr", "--lr"], {"min_lr": 1e-7}),
    ({"lr_warmup_iters": 5, "lr_warmup_init": 1.0}, ["--lr-warmup-init"], {"lr_warmup_init": 1e-8}),
    (
        {"lr_warmup_iters": 5, "lr_warmup_fraction": 0.1},
        ["--lr-warmup-iters", "--lr-warmup-fraction"],
        {"lr_warmup_iters": 0},
    ),
    ({"lr_warmup_init": 1e-8}, ["--lr-warmup-init", "--lr-warmup-iters"], {"lr_warmup_iters": 5}),
    ({"min_lr": 1e-7}, ["--min-lr", "--lr-decay-style"], {"lr_decay_style": "cosine"}),
    ({"lr_decay_iters": 50}, ["--lr-decay-iters"], {"lr_decay_style": "linear"}),
    ({"lr_wsd_decay_iters": 5}, ["--lr-wsd-decay-iters", "WSD"], {"lr_decay_style": "WSD"}),
    ({"lr_wsd_decay_style": "linear"}, ["--lr-wsd-decay-style"], {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 5}),
    ({"lr_decay_style": "WSD"}, ["--lr-wsd-decay-iters", "e.g. 20"], {"lr_wsd_decay_iters": 20}),
    (
        {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 500},
        ["--lr-wsd-decay-iters 500", "200"],
        {"lr_wsd_decay_iters": 200},
    ),
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
    (
        {"context_parallel_recurrent": "gather"},
        ["--context-parallel-recurrent", "--context-parallel-size"],
        {"context_parallel_size": 2},
    ),
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
    (
        {"context_parallel_size": 2, "rollout_max_response_len": 16384},
        ["--rollout-max-response-len 16384", "--max-tokens-per-gpu 8192 x --context-parallel-size 2"],
        {"context_parallel_size": 4, "rollout_max_batch_tokens": 65536},
    ),
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
    (
        {"reward_timeout": 200, "max_staleness": 1, "mismatch_correction": "tis"},
        ["--dist-timeout 1800", "for each of 2 rollouts (--max-staleness 1) is 450 s", "3 x --reward-timeout is 600 s"],
        {"dist_timeout": 2400},
    ),
    ({"max_restarts": 1, "save_interval": 0}, ["--max-restarts", "--save-interval"], {"save_interval": 5}),
]


@pytest.mark.parametrize(("values", "named", "repair"), REFUSED, ids=[" ".join(named) for _, named, _ in REFUSED])
def test_what_cannot_work_is_one_line_with_the_way_out(values, named, repair):
    assert_refused(values, named, repair)


# With data that is named; Python may hand over data of its own.
DATA_REFUSED = [
    ({"input_key": "question"}, ["--input-key", "reasoning_gym"], {"prompt_data": "a.jsonl"}),
    ({"label_key": "question"}, ["--label-key"], {"prompt_data": "a.jsonl"}),
    ({"metadata_key": "question"}, ["--metadata-key"], {"prompt_data": "gsm8k"}),
    ({"prompt_split": "test"}, ["--prompt-split"], {"prompt_data": "gsm8k"}),
    ({"prompt_data": "a.jsonl", "data_size": 10}, ["--data-size"], {"prompt_data": "reasoning_gym:spell_backward"}),
    ({"prompt_data": "a.jsonl?x=1", "prompt_split": "test"}, ["--prompt-split"], {"prompt_data": "folder"}),
]


@pytest.mark.parametrize(
    ("values", "named", "repair"), DATA_REFUSED, ids=[" ".join(named) for _, named, _ in DATA_REFUSED]
)
def test_options_that_the_data_cannot_use_are_refused(values, named, repair):
    config = Config(**{"hf_checkpoint": "x", **values})
    with pytest.raises(ConfigError) as caught:
        check_data_options(config)
    assert [part for part in named if part not in str(caught.value)] == []
    check_data_options(Config(**{"hf_checkpoint": "x", **values, **repair}))


def test_replicas_divide_the_world():
    config = Config(hf_checkpoint="x", fsdp_replicate_size=2)
    check_world_size(config, 4)
    with pytest.raises(ConfigError, match="--fsdp-replicate-size 2 must divide the number of processes, 3"):
        check_world_size(config, 3)
