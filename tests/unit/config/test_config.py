"""Sections and flat keys are equivalent, errors are one line, and derived values are correct."""

import pytest

from fsdptrain import errors
from fsdptrain.config import AlgorithmConfig, Config, FsdpConfig
from fsdptrain.config.keys import all_keys
from fsdptrain.errors import ConfigError
from fsdptrain.trainer.batches import PackingRules


def config(**values):
    return Config(**{"hf_checkpoint": "x", **values})


def test_sections_flat_keys_and_records_are_three_ways_to_say_the_same():
    flat = config(lr=1e-5, fsdp_cpu_offload=True, algorithm="gspo", reward=["math"])
    nested = Config(
        model={"hf_checkpoint": "x"}, optim={"lr": 1e-5}, fsdp={"cpu_offload": True}, algorithm={"algorithm": "gspo"},
        reward={"reward": ["math"]},
    )  # fmt: skip
    records = config(
        lr=1e-5, fsdp=FsdpConfig(cpu_offload=True), algorithm=AlgorithmConfig(algorithm="gspo"), reward="math"
    )
    assert flat == nested == records


def test_every_option_has_a_flag_of_its_own_and_a_help_text():
    flags = [key.flag for key in all_keys().values()]
    assert len(set(flags)) == len(flags)
    assert all_keys()["fsdp_cpu_offload"].flag == "--fsdp-cpu-offload"
    assert [key.flag for key in all_keys().values() if not key.field.description] == []


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"eps_clip": 1.5}, "--eps-clip must be less than 1, got 1.5"),
        ({"eps_clip": -1}, "--eps-clip must be greater than 0, got -1"),
        ({"rollout_temperature": 1e30}, "--rollout-temperature must be at most 100, got 1e+30"),
        ({"lr": float("inf")}, "--lr must be finite, got inf"),
        ({"num_rollout": None}, "--num-rollout must be a whole number, got None"),
        ({"fsdp_cpu_offload": "yes"}, "--fsdp-cpu-offload must be true or false, got 'yes'"),
        ({"fsdp": {"cpu_offload": 1}}, "--fsdp-cpu-offload must be true or false, got 1"),
        ({"eps_clip_high": "x"}, "--eps-clip-high must be a number, got 'x'"),
        ({"output_dir": "a\0b"}, "--output-dir holds a NUL character: 'a\\x00b'"),
        ({"output_dir": 3}, "--output-dir must be a text, got 3"),
        ({"reward": 3}, "--reward must be a list of texts, got 3"),
        ({"reward": []}, "--reward needs at least one, got []"),
        ({"chat_template_kwargs": []}, "--chat-template-kwargs must be a mapping (on the command line: key=value ...)"),
        ({"learning_rate": 1}, "unknown key 'learning_rate'"),
        ({"fsdp": {"cpu_ofload": True}}, "unknown key 'cpu_ofload' in section 'fsdp'; did you mean 'cpu_offload'?"),
        ({"use_kl_loss": True}, "unknown key 'use_kl_loss': it is --kl-loss-coef here"),
        ({"fsdp": True}, "'fsdp' is a section, it takes a mapping such as {cpu_offload: False}, got True"),
        ({"lr": 1e-5, "optim": {"lr": 1e-5}}, "optim.lr is given twice, in its section and flat: give it once"),
    ],
)
def test_a_bad_value_is_one_line_that_names_the_flag(values, line):
    with pytest.raises(ConfigError) as caught:
        config(**values)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_a_config_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        config().optim.lr = 1.0


def test_the_size_of_a_rollout_and_of_its_steps():
    grpo = config(rollout_batch_size=32, n_samples_per_prompt=8, global_batch_size=64, num_rollout=10)
    assert (grpo.samples_per_rollout, grpo.steps_per_rollout, grpo.total_optimizer_steps) == (256, 4, 40)
    assert not grpo.on_policy
    assert config().on_policy
    twice = config(epochs_per_rollout=2, num_rollout=10)
    assert (twice.steps_per_rollout, twice.scores_policy, twice.total_optimizer_steps) == (2, True, 20)
    assert config(global_batch_size=64, epochs_per_rollout=2).steps_per_rollout == 8
    sft = config(algorithm="sft", global_batch_size=64, num_rollout=10)
    assert (sft.samples_per_rollout, sft.steps_per_rollout, sft.total_optimizer_steps) == (64, 1, 10)
    assert config(algorithm="sft", rollout_batch_size=16).samples_per_rollout == 16


def test_evaluation_needs_prompts_and_a_time():
    assert config().evaluates
    assert not config(eval_interval=0).evaluates
    assert not config(eval_size=0).evaluates


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({}, ""),
        ({"mismatch_correction": "tis", "global_batch_size": 128, "use_opsm": True}, ""),
        ({"router_replay": "rollout"}, ""),
        ({"algorithm": "prime_rl"}, "--loss prime_rl"),
        ({"algorithm": "sft"}, "--loss sft"),
        ({"loss": "my.losses:mine"}, "--loss my.losses:mine"),
        ({"kl_loss_coef": 0.1}, "--kl-loss-coef 0.1"),
        ({"entropy_coef": 0.01}, "--entropy-coef 0.01"),
    ],
    ids=str,
)
def test_samples_of_advantage_0_are_skipped_unless_an_option_gives_them_a_gradient(values, reason) -> None:
    config = Config(**{"hf_checkpoint": "x", "kl_loss_coef": 0.0, **values})
    assert config.trains_zero_advantage == reason
    assert PackingRules.of(config, layout="packed").skips_zero_advantage is not bool(reason)


def test_each_model_and_algorithm_has_a_folder_by_default() -> None:
    def folder(**values: object) -> str:
        return Config(**{"hf_checkpoint": "Qwen/Qwen3-4B", **values}).run.output_dir

    assert folder() == "runs/Qwen3-4B-grpo"
    assert folder(algorithm="sft", hf_checkpoint="/models/b/") == "runs/b-sft"
    assert folder(output_dir="x") == folder(run={"output_dir": "x"}) == "x"


def test_messages_name_keywords_in_python(monkeypatch):
    monkeypatch.setattr(errors, "in_python", True)
    with pytest.raises(ConfigError, match=r"^eps_clip must be less than 1, got 3; lr must be greater than 0, got 0$"):
        Config(hf_checkpoint="x", eps_clip=3, lr=0)
    with pytest.raises(ConfigError, match=r"^unknown key 'learning_rate': it is lr here$"):
        Config(hf_checkpoint="x", learning_rate=1)
    with pytest.raises(ConfigError, match=r"^fp16 and bf16 are both on: choose one, e\.g\. fp16 bf16=False$"):
        Config(hf_checkpoint="x", fp16=True, bf16=True)
    assert str(ConfigError("torchrun --nnodes 2 --max-tokens-per-gpu 3")) == "torchrun --nnodes 2 max_tokens_per_gpu 3"
