"""From argv to values: every spelling of a flag, and one line for each mistake."""

import re
from typing import get_args

import pytest

from fsdptrain.config import Config, resolve
from fsdptrain.config.flags import config_options, convert
from fsdptrain.config.keys import all_keys
from fsdptrain.config.other_names import NONE, advice, names_here, sections, tables
from fsdptrain.errors import ConfigError

MODEL = ["--hf-checkpoint", "x"]
FLAG = r"--[a-z][a-z0-9-]+[a-z0-9]"
EXTRA = {f"--sft-loss-on {value}": ["--algorithm", "sft"] for value in ("all", "assistant")}
OF_TORCHRUN = {"--nnodes", "--rdzv-backend", "--rdzv-endpoint", "--max-restarts", "--log-dir", "--redirects", "--tee"}


def is_number(annotation):
    return not {int, float}.isdisjoint({annotation, *get_args(annotation)})


def value(flat, *argv):
    return resolve([*MODEL, *argv]).config.value(flat)


@pytest.mark.parametrize(
    ("flat", "argv", "expected"),
    [
        ("lr", ["--lr", "2e-5"], 2e-5),
        ("lr", ["--lr=2e-5"], 2e-5),
        ("lr", ["--lr", "1", "--lr", "2"], 2.0),
        ("bf16", ["--no-bf16"], False),
        ("bf16", ["--no-bf16", "--bf16"], True),
        ("fsdp_cpu_offload", ["--fsdp-cpu-offload"], True),
        ("fsdp_cpu_offload", ["--fsdp_cpu_offload"], True),
        ("rollout_seed", ["--rollout-seed", "-1"], -1),
        ("system_prompt", ["--system-prompt=--think"], "--think"),
        ("system_prompt", ["--system-prompt", ""], ""),
        ("prompt_data", ["--prompt-data", "reasoning_gym:sort?min=1&max=2"], "reasoning_gym:sort?min=1&max=2"),
        ("reward", ["--reward", "math", "format=0.2", "--lr", "1"], ["math", "format=0.2"]),
        ("reward", ["--reward", "a", "b", "--lr", "1", "--reward", "c"], ["c"]),
        ("log_to", ["--log-to"], []),
        (
            "chat_template_kwargs",
            ["--chat-template-kwargs", "t=false", "n=3", "s=a=b"],
            {"t": False, "n": 3, "s": "a=b"},
        ),
        ("log_run_name", ["--log-run-name", "None", "--log-to", "wandb"], None),
        ("lr_decay_style", ["--lr-decay-style", "cosine"], "cosine"),
        ("fsdp_reshard_after_forward", ["--fsdp-reshard-after-forward"], True),
        ("fsdp_reshard_after_forward", ["--no-fsdp-reshard-after-forward"], False),
        ("logprob_chunk_size", ["--logprob-chunk-size", "64"], 64),
    ],
)
def test_flags_are_read(flat, argv, expected):
    assert value(flat, *argv) == expected


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--lr", "abc"], "--lr must be a number, got 'abc'"),
        (["--lr"], "--lr needs a value: a number"),
        (["--lr", "--bf16"], "--lr needs a value: a number"),
        (["--num-rollout", "2.5"], "--num-rollout must be a whole number, got '2.5'"),
        (["--layout", "packd"], "--layout must be one of auto, packed, padded, got 'packd'; did you mean 'packed'?"),
        (["--fp16=false"], "--fp16 takes no value, got 'false': it is --fp16 or --no-fp16"),
        (["--fp16", "false"], "--fp16 takes no value, got 'false': it is --fp16 or --no-fp16"),
        (["--logprob-chunk-size", "all"], "--logprob-chunk-size must be a whole number, got 'all'"),
        (["--logprob-chunk-size", "0"], "--logprob-chunk-size must be at least 1, got 0"),
        (["--speed", "fast"], "unknown flag --speed: it was removed, set --compile yourself"),
        (["--load-in-2bit"], "unknown flag --load-in-2bit"),
        (["--hf-chekpoint", "x"], "unknown flag --hf-chekpoint; did you mean '--hf-checkpoint'?"),
        (["--no-lr"], "unknown flag --no-lr"),
        (["--learning-rate", "1e-6"], "unknown flag --learning-rate: it is --lr here"),
        (["--nnodes", "2"], "unknown flag --nnodes: torchrun starts multiple machines: torchrun --nnodes N --np"),
        (["--network-interface", "eth0"], "unknown flag --network-interface: set GLOO_SOCKET_IFNAME and NCCL_"),
        (["Qwen/Qwen3-4B"], "unexpected argument 'Qwen/Qwen3-4B': options begin with --, e.g. --hf-checkpoint Qwen"),
        (["--lr", "1", "2"], "unexpected argument '2'"),
        (["--rollout-engine-args", "a=" + "[" * 3000], "--rollout-engine-args must be a mapping"),
        (["--chat-template-kwargs", "a"], "--chat-template-kwargs must be a mapping (on the command line: key=value"),
        (["trainer.total_epochs=3"], "unexpected argument 'trainer.total_epochs=3': it is --num-rollout here"),
        (["trainer.nnodes=2"], "unexpected argument 'trainer.nnodes=2': torchrun starts multiple machines"),
        (["critic.optim.lr=1"], "unexpected argument 'critic.optim.lr=1': there is no critic here"),
        (["--critic.optim.lr", "1"], "unknown flag --critic.optim.lr: there is no critic here"),
        (
            ["--prompt-data", "x", "data.train_batch_size=3"],
            "unexpected argument 'data.train_batch_size=3': it is --roll",
        ),
        (["--micro-train-batch-size", "2"], "unknown flag --micro-train-batch-size: there is none here (batches are "),
        (["--vllm_num_engines", "2"], "unknown flag --vllm-num-engines: --rollout-engine vllm has one on each GPU"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_printed(argv, line, capsys):
    with pytest.raises(ConfigError) as caught:
        resolve(argv)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("flat", [flat for flat, key in all_keys().items() if key.field.annotation is bool])
def test_every_boolean_can_be_set_both_ways(flat):
    flag = all_keys()[flat].flag
    adapter = ["--lora-rank", "8"]
    extra = {
        **dict.fromkeys(["load_in_4bit", "lora_rslora"], adapter),
        "offload_activations": ["--gradient-checkpointing"],
        "fp16": ["--no-bf16"],
        "use_opsm": ["--global-batch-size", "64"],
        "use_unbiased_kl": ["--kl-loss-coef", "0.1"],
        "train_vision": ["--image-key", "images", "--prompt-data", "x.jsonl"],
    }.get(flat, [])
    assert value(flat, flag, *extra) is True
    assert value(flat, "--no-" + flag[2:], *(extra if all_keys()[flat].default else [])) is False


@pytest.mark.parametrize("flat", [flat for flat, option in config_options().items() if option.annotation is not bool])
def test_every_default_can_be_written_as_a_flag(flat):
    """What a flag says is what its field takes: the types of the parser and of pydantic agree."""
    option = config_options()[flat]
    if isinstance(option.default, dict):
        words = [f"{key}={value}" for key, value in option.default.items()]
    else:
        words = option.default if isinstance(option.default, list) else [str(option.default)]
    converted = convert(option, words)
    assert converted == option.default
    assert type(converted) is type(option.default)
    Config(**{"hf_checkpoint": "x", flat: converted} if flat != "hf_checkpoint" else {"hf_checkpoint": "x"})


def test_each_name_of_another_trainer_leads_to_an_option():
    flags = {option.flag for option in config_options().values()} | {NONE}
    named = [here for table in tables().values() for here, _ in table.values()]
    assert {here.split()[0] for here in named} <= flags | {"--recipe"}
    for value in (here for here in named if " " in here):
        assert resolve([*MODEL, *value.split(), *EXTRA.get(value, [])])
    advised = {word for advised in sections()["advice"].values() for word in re.findall(FLAG, advised)}
    known = {flag.replace("--", "--no-") for flag in flags} | flags | OF_TORCHRUN
    notes = {word for table in tables().values() for _, note in table.values() for word in re.findall(FLAG, note)}
    assert advised | notes <= known
    assert not flags.intersection(names_here())
    assert {len(table) >= 12 for trainer, table in tables().items() if trainer != "guesses"} == {True}
    for name in names_here():
        assert advice(name, list(flags)) != ""


@pytest.mark.parametrize(
    ("word", "here"),
    [
        ("--per_device_train_batch_size", "--global-batch-size"),
        ("--use-vllm", "--rollout-engine vllm"),
        ("--torch-dtype", "--bf16, --fp16 or --no-bf16 [(]float32[)]"),
        ("--epochs", "--num-rollout"),
        ("--batch-size", "--rollout-batch-size, in prompts, or --global-batch-size, in samples of an optimizer step"),
        ("--config", "--recipe"),
        ("--gpus", "--nproc-per-node"),
        ("--use_wandb", "--log-to console wandb"),
        ("actor_rollout_ref.rollout.n=8", "--n-samples-per-prompt"),
        ("--data.train_files", "--prompt-data"),
        ("--beta", "--kl-loss-coef"),
    ],
)
def test_the_name_that_another_trainer_gives_an_option_is_translated(word, here):
    with pytest.raises(ConfigError, match=rf": it is {here}( here( \([^`\]]+\))?)?$"):
        resolve(["--hf-checkpoint", "x", word])


def test_a_key_of_a_section_is_translated_with_the_name_of_the_section():
    """verl's data.train_batch_size counts prompts, train_batch_size of OpenRLHF counts samples."""
    with pytest.raises(
        ConfigError, match=r"'train_batch_size' in section 'data': it is --rollout-batch-size here .prompts.$"
    ):
        Config(hf_checkpoint="x", data={"train_batch_size": 8})
    with pytest.raises(ConfigError, match=r"'train_batch_size' in section 'run': it is --global-batch-size here$"):
        Config(hf_checkpoint="x", run={"train_batch_size": 8})


def test_all_problems_are_reported_at_once():
    argv = ["--learning-rate", "1", "--num-rollout", "2.5", "--fp16=no", "stray", "--eps-clip", "3", "--top-p", "0"]
    with pytest.raises(ConfigError) as caught:
        resolve([*MODEL, *argv])
    begins = ["unknown flag --learning-rate: it is --lr", "--num-rollout must be a whole", "--fp16 takes no value, got"]
    begins += ["unexpected argument 'stray'", "unknown flag --top-p: it is --rollout-top-p", "--eps-clip must be less"]
    assert [next(b for b in begins if line.startswith(b)) for line in caught.value.lines] == [*begins[:3], *begins[4:]]
    with pytest.raises(ConfigError) as caught:
        Config(hf_checkpoint="x", lr=0, adam_eps=0, eps_clip=-1, kl_loss_type=3)
    assert {line.split()[0] for line in caught.value.lines} == {"--lr", "--adam-eps", "--eps-clip", "--kl-loss-type"}
    with pytest.raises(ConfigError) as caught:
        Config(hf_checkpoint="x", learning_rate=1, epochs=2)
    assert [line.split()[2] for line in caught.value.lines] == ["'learning_rate':", "'epochs':"]
    with pytest.raises(ConfigError) as caught:
        Config(hf_checkpoint="x", kl_loss_coef=0, kl_loss_type="k1", use_unbiased_kl=True, mismatch_high=3.0)
    flags = ["--kl-loss-type", "--use-unbiased-kl", "--mismatch-high"]
    assert [line.split()[0] for line in caught.value.lines] == flags


@pytest.mark.parametrize("flat", [flat for flat, key in all_keys().items() if is_number(key.field.annotation)])
def test_no_number_is_negative_or_not_finite(flat):
    for value in [float("nan"), float("inf"), -1][: 2 if flat in ("seed", "rollout_seed", "pass_threshold") else 3]:
        with pytest.raises(ConfigError, match=all_keys()[flat].flag):
            Config(hf_checkpoint="x", **{flat: value})


@pytest.mark.parametrize("flag", ["--banana", "--gpu", "--zzz-size", "--actor-rollout-ref.actor.optim.lr-x"])
def test_a_flag_that_is_not_close_to_any_gets_no_suggestion(flag):
    with pytest.raises(ConfigError, match=f"^unknown flag {flag}$"):
        resolve(["--hf-checkpoint", "x", flag, "1"])
