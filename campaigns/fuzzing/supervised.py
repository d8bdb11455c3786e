"""Rows of supervised data in each form, and what a run does with one."""

from typing import Any

from fsdptrain.config import DataConfig
from fsdptrain.config.sft import SftConfig
from fsdptrain.data.rows import content_hash
from fsdptrain.data.sft import SampleBuilder, untokenized
from fsdptrain.data.tables import as_rows
from tests.testing import tiny_tokenizer

CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": [1]}}}
TURNS = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
SUPERVISED = [
    {"messages": [*TURNS, {"role": "tool", "content": "1"}], "tools": [CALL]},
    {"conversations": [{"from": "human", "value": "1?"}, {"from": "gpt", "value": "1"}], "system": "S"},
    {"instruction": "Add.", "input": "1", "output": "1"},
    {"prompt": TURNS[:1], "completion": [{"role": "assistant", "content": "1"}]},
    {"text": "1"},
]


def build_supervised(row: Any) -> None:
    data = DataConfig(prompt_data="x")
    table = as_rows([row], data, sft=SftConfig())
    content_hash(table[0])
    SampleBuilder(tiny_tokenizer(), data, "assistant", max_prompt_len=99).build(untokenized(table[0]))
