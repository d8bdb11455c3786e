"""Combinations that cannot work or have no effect are refused in one line with the fix; repaired ones are accepted."""

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import pytest

from fsdptrain.config import Config
from fsdptrain.config.checks import check_data_options
from fsdptrain.config.keys import Key, all_keys
from fsdptrain.config.rules import Condition, Requires, Rule
from fsdptrain.errors import ConfigError

SFT = {"algorithm": "sft"}
OFF_POLICY = {"global_batch_size": 64}
URLS = {"rollout_engine": "vllm-server", "rollout_urls": ["http://127.0.0.1:8000"]}
STARTED = {"rollout_engine": "vllm-server", "rollout_num_servers": 2}
TEACHER, SERVER = {"opd_teacher": "y"}, "http://127.0.0.1:8000"
VALUES: dict[str, Any] = {"eval_size": 0, "lr_warmup_fraction": 0.1, "rollout_urls": [SERVER]}  # where "x" is none
BESIDE: dict[str, dict[str, Any]] = {  # what the option of a condition needs itself
    "ref_load": {"kl_loss_coef": 0.1},
    "load_in_4bit": {"lora_rank": 8},
    "load_in_8bit": {"lora_rank": 8},
    "lora_sync": {"lora_rank": 8, "rollout_engine": "vllm"},
    "gradient_checkpointing_kind": {"gradient_checkpointing": True},
    "rollout_urls": {"rollout_engine": "vllm-server"},
    "megatron_context_parallel": {"backend": "megatron"},
    "megatron_pipeline_parallel": {"backend": "megatron"},
    "megatron_sequence_parallel": {"backend": "megatron", "megatron_tensor_parallel": 2},
}


def another(key: Key) -> Any:
    """Return a value of the option that is not its default."""
    default, choices = key.default, get_args(key.field.annotation)
    if key.flat in VALUES:
        return VALUES[key.flat]
    if isinstance(default, bool):
        return not default
    if get_origin(key.field.annotation) is Literal:
        return next(choice for choice in choices if choice != default)
    if isinstance(default, float):
        return 0.5 if default != 0.5 else 0.25
    return default + 1 if isinstance(default, int) else "x"


def meeting(condition: Condition) -> dict[str, Any]:
    """Return options for which the condition holds."""
    value: Any = another(all_keys()[condition.key])
    if condition.relation == ">":
        value = int(float(condition.values[0])) + 1
    elif condition.relation == "=" and condition.key not in VALUES:
        value = condition.values[0]
    return {**BESIDE.get(condition.key, {}), condition.key: value}


def broken_rules() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each option with a declared rule, and other options with which it breaks the rule."""
    plain = Config(hf_checkpoint="x")
    for flat, key in all_keys().items():
        for rule in (rule for rule in key.rules if isinstance(rule, Rule)):
            conditions = [condition for condition in rule.conditions if condition.key[0] != "@"]
            if not isinstance(rule, Requires):
                yield from ((flat, meeting(condition)) for condition in conditions)
            elif not any(plain.holds(c) or c.key == flat for c in rule.conditions):
                yield flat, {}


@pytest.mark.parametrize(("flat", "others"), list(broken_rules()), ids=str)
def test_each_declared_rule_refuses_its_option_in_one_line(flat: str, others: dict[str, Any]) -> None:
    key = all_keys()[flat]
    with pytest.raises(ConfigError) as caught:
        Config(**{"hf_checkpoint": "x", **others, flat: another(key)})
    assert key.flag.removeprefix("--") in str(caught.value)
    assert "\n" not in str(caught.value)


# Refusals that are code: (rejected flags, text in the error line, flags that fix it; None: no short fix)
REFUSED: list[tuple[dict[str, Any], list[str], dict[str, Any] | None]] = [
    ({"lora_rank": 8, "lora_dropout": 0.1}, ["--lora-dropout", "reinforcement", "--algorithm sft"], SFT),
    ({"eval_interval": 0, "eval_size": 64}, ["--eval-size", "--eval-interval 0"], {"eval_interval": 5}),
    ({**SFT, "reward": "exact"}, ["--reward", "never generates"], {"sft_eval_generate": True}),
    ({"image_key": "i", "rollout_engine": "vllm"}, ["--image-key", "--rollout-engine vllm"], {"rollout_engine": "hf"}),
    ({"profile_steps": "190:201"}, ["--profile-steps 190:201", "200 steps"], {"num_rollout": 201}),
    ({"profile_steps": "5:3"}, ["--profile-steps 5:3", "FIRST:LAST"], {"profile_steps": "3:5"}),
    ({"algorithm": "opd"}, ["--algorithm opd", "--opd-teacher"], TEACHER),
    ({"advantage_estimator": "none"}, ["--advantage-estimator none", "--opd-teacher"], TEACHER),
    ({**TEACHER, "algorithm": "gspo"}, ["--opd-loss token", "--loss gspo"], {"opd_loss": "jsd"}),
    ({**TEACHER, "tensor_parallel_size": 2}, ["--opd-teacher", "--tensor-parallel-size"], {"opd_teacher": SERVER}),
    ({**TEACHER, "opd_teacher_timeout": 5.0}, ["--opd-teacher-timeout", "no server"], {"opd_teacher": SERVER}),
    ({"opd_teacher": SERVER, "rollout_temperature": 0.7}, ["--opd-teacher", "--rollout-temperature 0.7"],
     {"rollout_temperature": 1.0}),
    ({"opd_teacher": SERVER, "opd_loss": "jsd"}, ["--opd-teacher", "--opd-top-k"], {"opd_top_k": 8}),
    ({**TEACHER, "opd_loss": "jsd", "epochs_per_rollout": 2}, ["--opd-loss jsd", "--epochs-per-rollout 2"],
     {"epochs_per_rollout": 1}),
    ({"hf_checkpoint": ""}, ["--hf-checkpoint", "Qwen/Qwen3-4B"], {"hf_checkpoint": "x"}),
    ({"resume": ""}, ["--resume"], {"resume": "never"}),
    ({"fp16": True, "bf16": True}, ["--fp16", "--no-bf16"], {"bf16": False}),
    ({"prompt_data": "environment"}, ["--prompt-data", "--environment"], {"environment": "calculator"}),
    ({"eval_prompt_data": "environment"}, ["--eval-prompt-data", "held out"], {"eval_prompt_data": None}),
    ({"optimizer": "adam"}, ["--optimizer", "'adamw'"], {"optimizer": "adamw"}),
    ({"optimizer": "muon", "offload_optimizer": True}, ["--offload-optimizer", "--optimizer muon"],
     {"optimizer": "adamw"}),
    ({"optimizer": "muon", "tensor_parallel_size": 2}, ["--optimizer muon", "--tensor-parallel-size"],
     {"optimizer": "adamw"}),
    ({"optimizer": "adamw8bit"}, ["--optimizer", "'adamw8bit'", "adamw, muon, sgd or package.module:function"],
     {"optimizer": "adamw"}),
    ({"fp8": ["training", "training"]}, ["--fp8 training training", "twice"], {"fp8": ["training"]}),
    ({"fp8": ["training"], "lora_rank": 8}, ["--fp8 training", "--lora-rank"], {"fp8": []}),
    ({"fp8": ["training"], "liger": True}, ["--fp8 training", "--liger"], {"fp8": []}),
    ({"fp8": ["training"], "fp16": True, "bf16": False}, ["--fp8 training", "--fp16"], {"fp8": []}),
    ({"fp8": ["training"], "tensor_parallel_size": 2}, ["--fp8 training", "--tensor-parallel-size"], {"fp8": []}),
    ({"fp8": ["training"], "expert_parallel_size": 2}, ["--fp8 training", "--expert-parallel-size"], {"fp8": []}),
    ({"fp8": ["rollout"]}, ["--fp8 rollout", "--rollout-engine vllm"], {"rollout_engine": "vllm"}),
    ({"fp8": ["rollout"], "fp8_recipe": "tensorwise", "rollout_engine": "vllm"},
     ["--fp8-recipe", "without --fp8 training"],
     {"fp8": ["training", "rollout"]}),
    ({"fp8": ["rollout"], "rollout_engine": "vllm", "rollout_engine_args": {"quantization": "fp8"}},
     ["--fp8 rollout", "--rollout-engine-args quantization"],
     {"fp8": []}),
    ({"fp8": ["rollout"], "rollout_engine": "vllm-server", "rollout_urls": ["http://127.0.0.1:1"]},
     ["--fp8 rollout", "--quantization fp8"],
     {"fp8": []}),
    ({"lora_rank": 8, "lora_targets": ["q_proj", "q_proj"]}, ["--lora-targets", "twice"], {"lora_targets": "q_proj"}),
    ({"rollout_max_response_len": 8192}, ["--rollout-max-response-len 8192", "--max-tokens-per-gpu 8192"],
     {"max_tokens_per_gpu": 9000}),
    ({"rollout_max_prompt_len": 7000}, ["--rollout-max-prompt-len 7000", "--overlong-samples drop"],
     {"overlong_samples": "drop"}),
    ({"rollout_max_batch_tokens": 100}, ["--rollout-max-batch-tokens 100"], {"rollout_max_batch_tokens": 8192}),
    ({"lr_decay_style": "linear", "min_lr": 1.0}, ["--min-lr", "--lr"], {"min_lr": 1e-07}),
    ({"lr_warmup_iters": 5, "lr_warmup_init": 1.0}, ["--lr-warmup-init"], {"lr_warmup_init": 1e-08}),
    ({"lr_decay_style": "WSD"}, ["--lr-wsd-decay-iters", "e.g. 20"], {"lr_wsd_decay_iters": 20}),
    ({"lr_decay_style": "WSD", "lr_wsd_decay_iters": 500}, ["--lr-wsd-decay-iters 500", "200"],
     {"lr_wsd_decay_iters": 200}),
    ({"lr_decay_style": "cosine", "lr_warmup_iters": 200}, ["--lr-warmup-iters 200"], {"lr_warmup_iters": 199}),
    ({"log_to": ["wand"]}, ["--log-to", "'wand'", "wandb"], {"log_to": ["wandb"]}),
    ({"log_to": ["console", "console"]}, ["--log-to", "twice"], {"log_to": ["console"]}),
    ({"log_project": "p"}, ["--log-project", "trackio"], {"log_to": ["trackio"]}),
    ({"context_parallel_size": 2, "rollout_max_response_len": 16384},
     ["--rollout-max-response-len 16384", "--max-tokens-per-gpu 8192 x --context-parallel-size 2"],
     {"context_parallel_size": 4, "rollout_max_batch_tokens": 65536}),
    ({"reward_timeout": 301}, ["--dist-timeout 1800", "3 x --reward-timeout is 903 s"], {"reward_timeout": 300}),
    ({"reward_timeout": 200, "max_staleness": 1, "mismatch_correction": "tis"},
     ["--dist-timeout 1800", "for each of 2 rollouts (--max-staleness 1) is 450 s", "3 x --reward-timeout is 600 s"],
     {"dist_timeout": 2400}),
    ({**STARTED, "lora_rank": 8, "lora_sync": "adapter", "max_staleness": 1, "mismatch_correction": "tis"},
     ["--lora-sync", "--max-staleness 1"],
     None),
    ({**SFT, "rollout_batch_size": 8, "global_batch_size": 4}, ["--rollout-batch-size"], {"rollout_batch_size": 4}),
    ({"n_samples_per_prompt": 1}, ["--n-samples-per-prompt", "at least 2"], {"n_samples_per_prompt": 2}),
    ({"n_samples_per_prompt": 1}, ["--n-samples-per-prompt"], {"advantage_estimator": "my.advantages:baseline"}),
    ({"ref_update_interval": 1, "kl_loss_coef": 0.1},
     ["--ref-update-interval 1", "KL divergence 0", "--global-batch-size below 256"],
     {"ref_update_interval": 2}),
    ({"mismatch_rejection": "seq_mean_k3"}, ["--mismatch-rejection-max", "0.01"], {"mismatch_rejection_max": 0.01}),
    ({"algorithm": "prime_rl", "mismatch_rejection": "token_k1", "mismatch_rejection_max": 0.1},
     ["--mismatch-rejection", "prime_rl"],
     {"algorithm": "grpo"}),
    ({"eps_clip_high": 0.28}, ["--eps-clip-high", "--global-batch-size below 256"], OFF_POLICY),
    ({"eps_clip": 0.1}, ["--eps-clip ", "ratio is always 1"], {"use_rollout_logprobs": True}),
    ({"eps_clip_c": 3.0}, ["--eps-clip-c"], OFF_POLICY),
    ({"use_opsm": True}, ["--use-opsm", "ratio is always 1"], OFF_POLICY),
    ({**OFF_POLICY, "loss": "cispo", "eps_clip": 0.1}, ["--eps-clip ", "--loss cispo"], {"loss": "grpo"}),
    ({**OFF_POLICY, "algorithm": "gspo", "is_cap_high": 2.0}, ["--is-cap-high", "--loss gspo"], {"algorithm": "cispo"}),
    ({"algorithm": "cispo", "is_cap_high": 2.0}, ["--is-cap-high", "ratio is always 1"], OFF_POLICY),
    ({**OFF_POLICY, "sapo_tau_pos": 2.0}, ["--sapo-tau-pos", "--loss grpo"], {"loss": "sapo"}),
    ({"prime_rl_kl_coef": 0.1}, ["--prime-rl-kl-coef", "--loss grpo"], {"algorithm": "prime_rl"}),
    ({"algorithm": "prime_rl", "use_rollout_logprobs": True}, ["--use-rollout-logprobs", "prime_rl"],
     {"algorithm": "grpo"}),
    ({"algorithm": "prime_rl", "mismatch_correction": "tis"}, ["--mismatch-correction", "prime_rl"],
     {"algorithm": "grpo"}),
    ({"max_staleness": 1}, ["--max-staleness 1", "--mismatch-correction tis"], {"mismatch_correction": "tis"}),
    ({"max_staleness": 1}, ["--loss grpo", "--use-rollout-logprobs"], {"use_rollout_logprobs": True}),
    ({"max_staleness": 1, "algorithm": "gspo"}, ["--max-staleness 1", "--loss gspo"], {"algorithm": "prime_rl"}),
    ({**STARTED, "max_staleness": 2, "algorithm": "prime_rl", "router_replay": "rollout"},
     ["--router-replay rollout", "--max-staleness 2"],
     {"max_staleness": 0}),
    ({"loss": "gpso"}, ["--loss", "'gpso'", "gspo", "package.module:function"], {"loss": "gspo"}),
    ({"loss": "sft"}, ["--loss sft", "--algorithm sft"], {"loss": "my.losses:mine"}),
    ({**SFT, "loss": "grpo"}, ["--loss", "--algorithm sft"], {"loss": "my.losses:mine"}),
    ({"advantage_estimator": "grppo"},
     ["--advantage-estimator", "'grppo'", "did you mean 'grpo'", "package.module:function"],
     {"advantage_estimator": "my.advantages:mine"}),
    ({"overlong_penalty": 1.0, "overlong_buffer": 4096}, ["--overlong-buffer 4096", "--rollout-max-response-len 2048"],
     {"overlong_buffer": 2048}),
    ({"router_replay": "scoring"}, ["--router-replay", "--router-replay rollout"], OFF_POLICY),
    ({"router_replay": "scoring"}, ["--router-replay"], {"kl_reward_coef": 0.1}),
    ({**OFF_POLICY, "router_replay": "scoring", "use_rollout_logprobs": True},
     ["--router-replay", "the policy is not scored"],
     {"router_replay": "rollout"}),
    ({"router_aux_loss_coef": -0.1}, ["--router-aux-loss-coef", "`config`", "-0.1"],
     {"router_aux_loss_coef": "config"}),
    ({"global_batch_size": 100}, ["--global-batch-size 100", "32", "8", "256", "e.g. 64"], OFF_POLICY),
    ({"global_batch_size": 512}, ["--global-batch-size 512", "e.g. 256"], OFF_POLICY),
    ({**OFF_POLICY, "steps_per_rollout": 3}, ["--steps-per-rollout 3", "make 4 steps of 64"], {"steps_per_rollout": 4}),
    ({"steps_per_rollout": 3, "epochs_per_rollout": 2},
     ["--steps-per-rollout 3", "multiple of --epochs-per-rollout 2", "e.g. 4"],
     {"steps_per_rollout": 4}),
    ({"steps_per_rollout": 257}, ["--steps-per-rollout 257", "= 256 samples", "at most 256"],
     {"steps_per_rollout": 256}),
    ({"rollout_engine": "vllm-server"}, ["--rollout-urls", "--rollout-num-servers", "one of the two"], None),
    ({**URLS, "rollout_num_servers": 1}, ["--rollout-urls", "--rollout-num-servers", "one of the two"], None),
    ({"rollout_engine": "vllm-server", "rollout_urls": ["http://a:b"]}, ["--rollout-urls", "is no address of a server"],
     None),
    ({"rollout_engine": "vllm-server", "rollout_urls": ["http://[x]:80"]},
     ["--rollout-urls", "is no address of a server"],
     None),
    ({"rollout_engine": "vllm-server", "rollout_urls": ["http://a :80"]},
     ["--rollout-urls", "is no address of a server"],
     None),
    ({"rollout_engine": "vllm-server", "rollout_urls": ["http://a:80#x"]},
     ["--rollout-urls", "is no address of a server"],
     None),
    ({"rollout_engine": "vllm-server", "rollout_urls": ["127.0.0.1:8000"]},
     ["--rollout-urls '127.0.0.1:8000'", "http://"],
     None),
    ({"rollout_engine": "vllm-server", "rollout_urls": ["http://a:1", "http://a:1/"]}, ["--rollout-urls", "twice"],
     None),
    ({**STARTED, "min_servers": 3}, ["--min-servers 3", "2 servers"], None),
    ({**STARTED, "weight_sync_timeout": 900.0}, ["--dist-timeout 1800", "--weight-sync-timeout"], None),
    ({**URLS, "weight_sync_timeout": 850.0},
     ["--dist-timeout 1800", "1820 s", "--weight-sync-timeout", "one that comes back"],
     None),
]  # fmt: skip


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
