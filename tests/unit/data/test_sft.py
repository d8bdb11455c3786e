"""Samples for supervised training."""

import pytest

from fsdptrain.config import DataConfig
from fsdptrain.data.prompts import make_prompt
from fsdptrain.data.rows import Row
from fsdptrain.data.sft import episode_tokens, make_sample
from fsdptrain.data.tables import as_rows
from fsdptrain.errors import ConfigError, DataError
from fsdptrain.types import Prompt, Sample
from tests.testing import tiny_tokenizer


def sample_of(label: object) -> Sample:
    tokenizer = tiny_tokenizer()
    prompt = make_prompt(Row("r", "2+2?", label), tokenizer, data=DataConfig(prompt_data="x"))
    return make_sample("r", *episode_tokens(prompt, tokenizer))


def test_tool_calls_are_refused_and_not_left_out() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    with pytest.raises(DataError, match="the response of row r has tool_calls"):
        sample_of([call, TOLD, ANSWER])
    rows = as_rows([{"prompt": "2+2?", "label": "4", "tools": [{"name": "add"}]}], DataConfig(prompt_data="x"))
    with pytest.raises(DataError, match="row dataset:0 has a column `tools`"):
        rows[0]


ASK, TOLD, ANSWER = ({"role": r, "content": c} for r, c in (("assistant", "ask"), ("tool", "4"), ("assistant", "four")))


@pytest.mark.parametrize(
    "label", [[TOLD, ANSWER], [ASK, TOLD], [ASK, ANSWER], [ASK, {"role": "tool"}], ["four"], [{"content": "four"}]]
)
def test_a_conversation_must_alternate_and_end_with_the_assistant(label: object) -> None:
    with pytest.raises(DataError, match="the response of row r is a list"):
        sample_of(label)


def test_the_end_token_is_required() -> None:
    tokenizer = tiny_tokenizer()
    prompt = Prompt("r", [5], "a", label="b")
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        episode_tokens(prompt, tokenizer)
