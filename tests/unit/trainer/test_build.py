"""What a run makes of its options: data, environment, dtype, and rules for advantages and shaping."""

from itertools import chain
from typing import Any

import pytest
import torch

from fsdptrain.config import Config, to_yaml
from fsdptrain.config.recipe import load_recipe
from fsdptrain.errors import ConfigError, DataError
from fsdptrain.trainer.data import build_data
from fsdptrain.trainer.resolve import resolve, resolve_dtype
from fsdptrain.trainer.resuming import changed_values
from fsdptrain.trainer.samples.build import advantage_rule, shaping_rule
from fsdptrain.trainer.samples.environment import Agent, LoadedEnvironment
from tests.testing import tiny_tokenizer

LONG = "a" * 60
LONG_PROMPTS = "nothing is evaluated: all held-out prompts are too long; raise --rollout-max-prompt-len"


@pytest.mark.parametrize(
    ("num_short", "num_long", "eval_size", "held_out", "told"),
    [
        (30, 0, None, 3, []),
        (9, 0, None, 0, ["nothing is evaluated: 9 rows are too few to hold out a tenth of; set --eval-size"]),
        (9, 0, 0, 0, []),
        (9, 0, 2, 2, []),
        (0, 3, 2, 0, ["evaluations leave out 2 of 2 prompts, which are longer than 40 tokens", LONG_PROMPTS]),
    ],
)
def test_missing_evaluation_prompts_are_logged(num_short, num_long, eval_size, held_out, told, caplog) -> None:
    rows = [
        {"prompt": f"{text} {i}", "label": ""} for text, n in (("a", num_short), (LONG, num_long)) for i in range(n)
    ]
    config = Config(hf_checkpoint="x", prompt_data="x.jsonl", rollout_max_prompt_len=40, eval_size=eval_size)
    if not num_short:
        with pytest.raises(DataError, match="none of 1 rows can be trained on"):  # before a model is loaded
            build_data(config, tiny_tokenizer(), rows, None)
        config = config.with_values(num_rollout=0)
    prompts = build_data(config, tiny_tokenizer(), rows, None).prompts
    assert len(prompts.get("heldout", ())) == held_out
    assert [record.getMessage() for record in caplog.records] == told
    if told and num_short:
        with pytest.raises(DataError, match=r"^--keep-best 1: nothing is evaluated: 9 rows"):
            build_data(config.with_values(keep_best=1), tiny_tokenizer(), rows, None)


def test_thinking_mode_is_off_for_the_default_data_only(caplog):
    tokenizer = tiny_tokenizer()
    plain = Config(hf_checkpoint="x", rollout_engine="hf")
    assert resolve(plain, tokenizer, None) == plain  # its template has no such mode
    tokenizer.chat_template += "{% if enable_thinking %}<think>{% endif %}"
    with caplog.at_level("INFO", logger="fsdptrain"):
        resolved = resolve(plain, tokenizer, None)
    assert resolved.data.chat_template_kwargs == {"enable_thinking": False}
    assert "--chat-template-kwargs enable_thinking=true turns it on" in caplog.text
    for values in ({"prompt_data": "x.jsonl"}, {"chat_template_kwargs": {"enable_thinking": True}}):
        other = Config(hf_checkpoint="x", rollout_engine="hf", **values)
        assert resolve(other, tokenizer, None) == other


def test_a_stop_token_beyond_the_vocabulary_is_refused():
    for ids, wrong in ([0, 260, -1], -1), ([261, 7], 261):
        with pytest.raises(
            ConfigError, match=f"--rollout-stop-token-ids {wrong}: the tokenizer of .* has no such token"
        ):
            resolve(Config(hf_checkpoint="x", rollout_stop_token_ids=ids), tiny_tokenizer(), None)


def calculate(expression: str) -> str:
    """Calculate.

    Args:
        expression: of numbers
    """
    return expression


def test_what_is_resolved_can_be_written_read_and_resolved_again(tmp_path, monkeypatch, caplog):
    """The engine, without the options that only others read; the environment's instructions and tools."""
    monkeypatch.setattr("fsdptrain.platform.device_type", lambda: "cpu")
    tools = (calculate, {"type": "function", "function": {"name": "other", "parameters": {}}})
    environment = LoadedEnvironment(object(), finish=None, dataset=None, system_prompt="Use tools.", tools=tools)
    config = Config(hf_checkpoint="x", environment="my:Own", rollout_engine_args={"max_num_seqs": 2})
    resolved = resolve(config, tiny_tokenizer(), environment)
    assert (resolved.rollout.engine, resolved.data.system_prompt) == ("hf", "Use tools.")
    names = [tool["function"]["name"] for tool in resolved.data.chat_template_kwargs["tools"]]
    assert names == ["calculate", "other"]
    assert "--rollout-engine-args has no effect" in caplog.text
    (tmp_path / "config.yaml").write_text(to_yaml(resolved))
    read = load_recipe(tmp_path / "config.yaml")
    assert read == resolved
    assert resolve(read, tiny_tokenizer(), environment) == resolved


@pytest.mark.parametrize(
    ("has", "values", "name"),
    [
        ("avx512_bf16", {}, "bfloat16"), ("amx_bf16", {}, "bfloat16"), ("bf16", {}, "bfloat16"),
        ("avx2", {}, "float32"), ("avx2", {"bf16": True}, "bfloat16"), ("amx_bf16", {"bf16": False}, "float32"),
        ("amx_bf16", {"fp16": True}, "float16"),
    ],
)  # fmt: skip
def test_a_cpu_computes_in_bfloat16_only_if_it_multiplies_it_or_is_told_to(
    monkeypatch: pytest.MonkeyPatch, has: str, values: dict[str, Any], name: str
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "x", has: True})
    monkeypatch.setenv("FSDPTRAIN_PLATFORM", "cpu")
    resolved, _ = resolve_dtype(Config(hf_checkpoint="x", **values))
    assert resolved.compute_dtype_name == name
    assert resolved.model.bf16 is (name == "bfloat16")


def scored(**values) -> Config:
    return Config(**{"hf_checkpoint": "x", "prompt_data": "x.jsonl", "reward": ["math=0.9", "format=0.1"], **values})


def test_only_enabled_penalties_shape() -> None:
    assert shaping_rule(scored()) is None
    assert shaping_rule(scored(algorithm="dapo")).overlong_penalty == 1.0


def test_the_scale_is_that_of_the_estimator_by_default() -> None:
    assert advantage_rule(scored(algorithm="reinforce++_baseline")).scale == "whiten"
    assert advantage_rule(scored(algorithm="reinforce++_baseline", advantage_scale="batch")).scale == "batch"


def test_an_invalid_estimator_is_one_line() -> None:
    with pytest.raises(ConfigError, match="--advantage-estimator math:pi is not a function"):
        advantage_rule(scored(advantage_estimator="math:pi"))


def test_another_value_in_a_mapping_is_named_by_its_key_because_it_may_be_a_secret(tmp_path):
    options = {"hf_checkpoint": "x", "environment": "my:Own"}
    (tmp_path / "config.yaml").write_text(to_yaml(Config(**options, environment_kwargs={"api_key": "old", "n": 1})))
    changes = changed_values(tmp_path, Config(**options, environment_kwargs={"api_key": "new", "n": 1}, lr=2.0))
    assert sorted(chain(*changes.values())) == ["--environment-kwargs with other api_key", "--lr 2.0 in place of 1e-06"]


def test_a_system_prompt_is_refused_for_an_agent_which_writes_its_own_messages():
    config = Config(hf_checkpoint="x", environment="my:agent", system_prompt="Be brief.")
    with pytest.raises(ConfigError, match="--system-prompt has no effect on an agent"):
        resolve(config, tiny_tokenizer(), LoadedEnvironment(Agent(None)))
