"""Combinations that cannot work or have no effect are refused in one line with the fix; repaired ones are accepted.

Declared rules are checked one by one, whatever else is wrong; problems that sections compute are listed below.
"""
# ruff: noqa: E501  # a case is one line

import shlex
from collections.abc import Iterable
from typing import Any, Literal, get_args, get_origin

import pytest

from fsdptrain.config import Config, resolve
from fsdptrain.config.checks import check_data_options, is_broken
from fsdptrain.config.keys import Key, all_keys
from fsdptrain.config.problems import rule_problem
from fsdptrain.config.rules import Condition, Excludes, Requires
from fsdptrain.errors import ConfigError

ON = {  # values for which a property of Config holds, or does not
    "@is_truncated": ({"rollout_top_k": 20}, {}),
    "@generates": ({}, {"algorithm": "sft"}),
    "@evaluates": ({}, {"eval_interval": 0}),
    "@stores_reference": ({"kl_loss_coef": 0.1}, {}),
}
DECLARED = [(flat, number) for flat, key in all_keys().items() for number, _ in enumerate(key.rules)]


def another(key: Key) -> Any:
    """Return a value that is not the default and turns the option on."""
    default, annotation = key.default, key.field.annotation
    choices = [c for choice in (annotation, *get_args(annotation)) for c in get_args(choice) if isinstance(c, str)]
    if isinstance(default, bool):
        return not default
    if get_origin(annotation) is Literal or (choices and default in choices):
        return next(choice for choice in choices if choice != default)
    if isinstance(default, int | float):
        return default + 1
    kind = next((kind for kind in (int, float, dict, list) if kind in (annotation, get_origin(annotation))), None)
    optional = next((kind for kind in (int, float) if kind in get_args(annotation)), str)
    return {dict: {"a": 1}, list: choices[:1] or ["x"]}.get(kind, 1 if optional is not str else "x")  # type: ignore[arg-type]


def values_for(condition: Condition, *, holds: bool) -> dict[str, Any]:
    """Return values by flat key for which a condition holds, or does not."""
    if condition.key in ON:
        return ON[condition.key][not holds]
    key = all_keys()[condition.key]
    if not holds:
        off = next((value for value in (key.default, 0, "other") if not condition.holds_for(value)), None)
        return {condition.key: off}
    if condition.relation == "=":
        return {condition.key: condition.values[0]}
    if condition.relation == ">":
        return {condition.key: int(condition.values[0]) + 1}
    return {condition.key: key.default if condition.holds_for(key.default) else another(key)}


def all_off(conditions: Iterable[Condition]) -> dict[str, Any]:
    return {flat: value for c in conditions for flat, value in values_for(c, holds=False).items()}


def config_with(key: Key, values: dict[str, Any]) -> Config:
    """Return an unchecked configuration in which the option is set."""
    return Config(hf_checkpoint="x").with_values(**{key.flat: another(key), **values})


@pytest.mark.parametrize(("flat", "number"), DECLARED, ids=[f"{flat}-{number}" for flat, number in DECLARED])
def test_a_declared_rule_refuses_its_conditions_in_one_line_and_nothing_else(flat: str, number: int) -> None:
    key = all_keys()[flat]
    rule = key.rules[number]
    if any(condition.key == flat for condition in rule.conditions):  # a section's rule, which names this option
        return
    off = all_off(rule.conditions)
    each_on = [all_off(set(rule.conditions) - {c}) | values_for(c, holds=True) for c in rule.conditions]
    refused, accepted = ([off], each_on) if isinstance(rule, Requires) else (each_on, [off])
    for values in refused:
        config = config_with(key, values)
        assert is_broken(config, rule)
        line = str(rule_problem(config, key, rule))
        assert key.flag[2:] in line
        assert ("does not work" if isinstance(rule, Excludes) else "has no effect") in line
        assert "\n" not in line
    assert [values for values in accepted if is_broken(config_with(key, values), rule)] == []


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ("--opsm-delta 1", "--opsm-delta has no effect without --use-opsm: add it, or leave --opsm-delta out"),
        ("--lora-alpha 8", "--lora-alpha has no effect without --lora-rank: set it, e.g. 32"),
        ("--eval-interval 0 --eval-size 4", "--eval-size has no effect with --eval-interval 0: remove it"),
        ("--keep-best 1 --eval-interval 0", "--keep-best has no effect with --eval-interval 0: remove it"),
        ("--async-save --save-interval 0", "--async-save has no effect without --save-interval or --keep-best: add it, or leave --async-save out"),
        ("--min-lr 1e-7", "--min-lr has no effect with --lr-decay-style constant: choose linear or cosine"),
        ("--lora-rank 8 --backend megatron", "--lora-rank 8 does not work with --backend megatron: leave one of them out"),
        ("--algorithm sft --mask-truncated", "--mask-truncated has no effect with --algorithm sft: remove it, or use another --algorithm, e.g. grpo"),
    ],
)  # fmt: skip
def test_the_line_of_a_rule_names_the_options_and_the_fix(argv: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(["--hf-checkpoint", "x", *shlex.split(argv)])
    assert str(caught.value) == line


# flags | words in the line | flags that repair it
COMPUTED = """
--profile-steps 190:201 | --profile-steps 190:201; 200 steps | --num-rollout 201
--profile-steps 5:3 | --profile-steps 5:3; FIRST:LAST | --profile-steps 3:5
--keep-every 75 | --keep-every 75; multiple of --save-interval 50 | --keep-every 100
--stop-when eval/heldout/accuracy=0.9 | --stop-when; > >= < <=; in quotes; 'eval/heldout/accuracy=0.9' | --stop-when reward/mean>=.9
--stop-when eval/loss<1 --eval-interval 0 | --stop-when eval/loss<1; --eval-interval | --stop-when optim/grad_norm<-1e-3
--algorithm opd | --algorithm opd; --opd-teacher | --opd-teacher y
--advantage-estimator none | --advantage-estimator none; --opd-teacher | --opd-teacher y
--opd-teacher y --algorithm gspo | --opd-loss token; --loss gspo | --opd-loss jsd
--opd-teacher y --tensor-parallel-size 2 | --opd-teacher; --tensor-parallel-size | --opd-teacher http://127.0.0.1:8000
--opd-teacher http://127.0.0.1:8000 --rollout-temperature 0.7 | --opd-teacher; --rollout-temperature 0.7 | --rollout-temperature 1.0
--opd-teacher y --rollout-top-p 0.9 | --opd-teacher; no teacher has; --rollout-top-p 1 | --rollout-top-p 1.0
--opd-teacher y --opd-loss jsd --epochs-per-rollout 2 | --opd-loss jsd; --epochs-per-rollout 2 | --epochs-per-rollout 1
--hf-checkpoint '' | --hf-checkpoint; Qwen/Qwen3-4B | --hf-checkpoint x
--fp16 --bf16 | --fp16; --no-bf16 | --no-bf16
--reward-timeout 901 | --reward-timeout 901; --dist-timeout | --dist-timeout 3600
--prompt-data environment | --prompt-data; --environment | --environment my:calculator
--eval-prompt-data environment | --eval-prompt-data; held out | --eval-prompt-data
--eval-prompt-data a=x.jsonl a=y.jsonl | a=x.jsonl; a different name, NAME=DATA | --eval-prompt-data a=x.jsonl a_=y.jsonl
--eval-prompt-data x.jsonl a=y.jsonl | x.jsonl; a different name | --eval-prompt-data heldout=x.jsonl a=y.jsonl
--eval-prompt-data a=x.jsonl a_greedy=y.jsonl | a_greedy=y.jsonl; a different name
--eval-prompt-data a/b=x.jsonl | a/b=x.jsonl; letters; ./a/b=x.jsonl | --eval-prompt-data ./a/b=x.jsonl
--eval-prompt-data a=x.jsonl --eval-metric eval/c/accuracy | --eval-metric eval/c/accuracy; are a | --eval-metric eval/a_greedy/accuracy
--eval-prompt-data a=x.jsonl --stop-when eval/c/accuracy>1 | --stop-when; are a | --stop-when eval/a/accuracy>1
--eval-prompt-data a= | a=; a set is NAME=DATA | --eval-prompt-data a=x.jsonl
--eval-prompt-data a=x.jsonl --eval-set-options a.sample=2 | a.sample; 'samples'; max_response_len | --eval-set-options a.samples=2
--eval-prompt-data a=x.jsonl --eval-set-options a.samples=0 | a.samples; at least 1, got 0 | --eval-set-options a.temperature=0
--eval-prompt-data a=x.jsonl --eval-set-options b.size=2 | b.size; SET.SETTING=VALUE | --eval-prompt-data b=x.jsonl
--eval-prompt-data a=x.jsonl --eval-set-options size=2 | SET.SETTING=VALUE; a | --eval-set-options 'a={size: 2}'
--eval-prompt-data a=x.jsonl --algorithm sft --eval-set-options a.samples=2 | a.samples; --algorithm sft | --eval-set-options a.size=2
--eval-prompt-data a=reasoning_gym:products --eval-set-options a.input_key=x | a.input_key; no columns | --eval-prompt-data a=x.jsonl
--optimizer adam | --optimizer; 'adamw' | --optimizer adamw
--optimizer muon --offload-optimizer | --offload-optimizer; --optimizer muon | --optimizer adamw
--optimizer muon --tensor-parallel-size 2 | --optimizer muon; --tensor-parallel-size | --optimizer adamw
--rollout-max-response-len 8192 | --rollout-max-response-len 8192; --max-tokens-per-gpu 8192 | --max-tokens-per-gpu 9000
--rollout-max-prompt-len 7000 | --rollout-max-prompt-len 7000; --overlong-samples drop | --overlong-samples drop
--overlong-samples truncate | --overlong-samples truncate; --algorithm sft | --overlong-samples drop
--rollout-max-batch-tokens 100 | --rollout-max-batch-tokens 100 | --rollout-max-batch-tokens 8192
--rollout-stop '' | --rollout-stop ''; a text | --rollout-stop x
--lr-decay-style linear --min-lr 1.0 | --min-lr; --lr | --min-lr 1e-07
--lr-decay-style cosine --lr-warmup-iters 200 | --lr-warmup-iters 200 | --lr-warmup-iters 199
--reward-key task --prompt-data a.jsonl | --reward-key task; --reward | --reward math code
--environment my:A my:B --prompt-data a.jsonl | --environment my:A my:B; --environment-key | --environment-key env
--log-to wand | --log-to; 'wand'; wandb | --log-to wandb
--log-to console console | --log-to; twice | --log-to console
--log-project p | --log-project; trackio | --log-to trackio
--context-parallel-size 2 --rollout-max-response-len 16384 | --rollout-max-response-len 16384; --max-tokens-per-gpu 8192 x --context-parallel-size 2 | --context-parallel-size 4 --rollout-max-batch-tokens 65536
--algorithm sft --rollout-batch-size 8 --global-batch-size 4 | --rollout-batch-size | --rollout-batch-size 4
--n-samples-per-prompt 1 | --n-samples-per-prompt; at least 2 | --n-samples-per-prompt 2
--n-samples-per-prompt 1 | --n-samples-per-prompt | --advantage-estimator my.advantages:baseline
--algorithm prime_rl --mismatch-correction tis | --mismatch-correction; prime_rl | --algorithm grpo
--eps-clip-high 0.28 | --eps-clip-high; --global-batch-size below 256 | --global-batch-size 64
--eps-clip 0.1 | --eps-clip; ratio is always 1 | --use-rollout-logprobs
--eps-clip-c 3.0 | --eps-clip-c | --global-batch-size 64
--use-opsm | --use-opsm; ratio is always 1 | --global-batch-size 64
--global-batch-size 64 --loss cispo --eps-clip 0.1 | --eps-clip; --loss cispo | --loss grpo
--global-batch-size 64 --algorithm gspo --is-cap-high 2.0 | --is-cap-high; --loss gspo | --algorithm cispo
--algorithm cispo --is-cap-high 2.0 | --is-cap-high; ratio is always 1 | --global-batch-size 64
--global-batch-size 64 --sapo-tau-pos 2.0 | --sapo-tau-pos; --loss grpo | --loss sapo
--algorithm prime_rl --use-rollout-logprobs | --use-rollout-logprobs; prime_rl | --algorithm grpo
--algorithm prime_rl --mismatch-correction tis | --mismatch-correction; prime_rl | --algorithm grpo
--max-staleness 1 | --max-staleness 1; --mismatch-correction tis | --mismatch-correction tis
--max-staleness 1 | --loss grpo; --use-rollout-logprobs | --use-rollout-logprobs
--max-staleness 1 --algorithm gspo | --max-staleness 1; --loss gspo | --algorithm prime_rl
--rollout-engine vllm-server --rollout-num-servers 2 --max-staleness 2 --algorithm prime_rl --router-replay rollout | --router-replay rollout; --max-staleness 2 | --max-staleness 0
--loss gpso | --loss; 'gpso'; gspo; package.module:function | --loss gspo
--loss sft | --loss sft; --algorithm sft | --loss my.losses:mine
--algorithm sft --loss grpo | --loss; --algorithm sft | --loss my.losses:mine
--advantage-estimator grppo | --advantage-estimator; 'grppo'; did you mean 'grpo'; package.module:function | --advantage-estimator my.advantages:mine
--router-replay scoring | --router-replay; --router-replay rollout | --global-batch-size 64
--global-batch-size 64 --router-replay scoring --use-rollout-logprobs | --router-replay; the policy is not scored | --router-replay rollout
--global-batch-size 100 | --global-batch-size 100; 32; 8; 256; e.g. 64 | --global-batch-size 64
--global-batch-size 512 | --global-batch-size 512; e.g. 256 | --global-batch-size 64
--rollout-engine vllm-server | --rollout-urls; --rollout-num-servers; one of the two
--rollout-engine vllm-server --rollout-urls http://127.0.0.1:8000 --rollout-num-servers 1 | --rollout-urls; --rollout-num-servers; one of the two
--rollout-engine vllm-server --rollout-urls http://a:1 http://a:1/ | --rollout-urls; twice
--rollout-engine vllm-server --rollout-num-servers 2 --weight-sync-timeout 900.0 | --dist-timeout 1800; --weight-sync-timeout
"""


@pytest.mark.parametrize("case", COMPUTED.strip().splitlines())
def test_a_problem_that_a_section_computes_is_one_line_with_the_fix(case: str) -> None:
    refused, words, repair = (part.strip() for part in (case + " | |").split("|")[:3])
    argv = ["--hf-checkpoint", "x", *shlex.split(refused)]
    with pytest.raises(ConfigError) as caught:
        resolve(argv)
    line = str(caught.value)
    assert "\n" not in line
    assert [word for word in words.split("; ") if word not in line] == []
    if repair:
        resolve([*argv, *shlex.split(repair)])


@pytest.mark.parametrize(
    "url",
    ["http://a:b", "http://a:99999", "http://a:0", "http://[::1", "http://[x]:80", "http://a\n:80", "http://a :80",
     "http://a..b:80", f"http://{'a' * 64}:80", "http://a:80#x", "127.0.0.1:8000", "http://user@a:1", "http://:secret@a:1"],
)  # fmt: skip
def test_what_is_no_address_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^--rollout-urls .* is no address of a server: write e.g. http") as caught:
        Config(hf_checkpoint="x", rollout_engine="vllm-server", rollout_urls=[url])
    assert "secret" not in str(caught.value)


# For named data; Python callers may pass data of their own.
DATA_REFUSED = [
    ({"input_key": "question"}, ["--input-key", "reasoning_gym"], {"prompt_data": "a.jsonl"}),
    ({"label_key": "question"}, ["--label-key"], {"prompt_data": "a.jsonl"}),
    ({"reward_key": "task", "reward": ["math", "code"]}, ["--reward-key"], {"prompt_data": "a.jsonl"}),
    ({"environment_key": "env", "environment": ["a:A"]}, ["--environment-key"], {"prompt_data": "a.jsonl"}),
    ({"image_key": "images"}, ["--image-key", "no columns"], {"prompt_data": "a.jsonl"}),
]  # fmt: skip


@pytest.mark.parametrize(("values", "named", "repair"), DATA_REFUSED)
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
