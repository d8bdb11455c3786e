"""Forms of supervised data: detection by columns, and conversion."""

import csv
import json
import logging
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import Dataset

from fsdptrain.config import DataConfig
from fsdptrain.config.data import SftConfig
from fsdptrain.data.rows import Row, Rows
from fsdptrain.data.sft_forms import Conversation, Text, Tokens, UnusableRowError
from fsdptrain.data.sources import load_rows
from fsdptrain.data.tables import as_rows
from fsdptrain.errors import ConfigError, DataError

ASK, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
TOOL = {"type": "function", "function": {"name": "add"}}


def rows_of(values: dict[str, Any], sft: SftConfig | None = None, **data: Any) -> Rows:
    return as_rows([values], DataConfig(**{"prompt_data": "x", **data}), sft=sft or SftConfig())


def row_of(values: dict[str, Any], sft: SftConfig | None = None, **data: Any) -> Row:
    return rows_of(values, sft, **data)[0]


@pytest.mark.parametrize(
    ("values", "line", "prompt", "label"),
    [
        (
            {"text": "x", "messages": [ASK, ANSWER]},
            "in the column messages",
            [ASK, ANSWER],
            Conversation([ASK, ANSWER]),
        ),
        ({"prompt": "2+2?", "completion": "4"}, "prompts in the column prompt, responses in completion", "2+2?", "4"),
        ({"prompt": [ASK], "label": "x", "completion": [ANSWER]}, "responses in completion", [ASK], [ANSWER]),
        ({"prompt": "2+2?", "label": "4", "text": "x"}, "responses in label", "2+2?", "4"),
        ({"text": "2+2=4"}, "text in the column text", "2+2=4", Text("2+2=4")),
        ({"text": "x", "input_ids": [5, 6], "labels": [-100, 6]}, "tokens in", "5 6", Tokens([5, 6], [False, True])),
    ],
)
def test_the_form_is_detected_by_the_columns_of_which_the_first_are_taken_and_logged(
    values, line, prompt, label, caplog
) -> None:
    caplog.set_level(logging.INFO)
    row = row_of(values)
    assert (row.prompt, row.label) == (prompt, label)
    assert line in caplog.text


def test_options_that_name_columns_are_respected() -> None:
    assert row_of({"query": "2+2?", "response": "4", "text": "x"}, input_key="query", label_key="response").label == "4"
    assert row_of({"chat": [ASK, ANSWER]}, input_key="chat").label == Conversation([ASK, ANSWER])
    assert row_of({"body": "2+2=4", "text": "x"}, input_key="body", label_key="").label == Text("2+2=4")


@pytest.mark.parametrize(
    ("values", "sft", "data", "message"),
    [
        ({"question": "a", "answer": "b"}, {}, {}, "none of the known forms .* its columns are question, answer; name"),
        ({"conversations": []}, {}, {}, "has the ShareGPT form: make a column `messages` of it with `datasets`"),
        ({"instruction": "a", "output": "b"}, {}, {}, "has the Alpaca form: "),
        ({"text": "a"}, {}, {"system_prompt": "S"}, "--system-prompt has no effect on .*, which is text"),
        ({"text": "a"}, {"loss_on": "last"}, {}, "--sft-loss-on last has no effect on .*, which is text"),
        ({"query": "a", "answer": "b"}, {}, {"input_key": "query"}, "--label-key 'label' is not a column"),
        ({"input_ids": [1], "labels": [1]}, {"loss_on": "all"}, {}, "--sft-loss-on all has no effect on .* is tokens"),
        ({"input_ids": [1]}, {}, {}, "none of the known forms .*input_ids with labels.* its columns are input_ids"),
    ],
)
def test_an_unknown_form_is_one_line(values, sft, data, message) -> None:
    with pytest.raises((DataError, ConfigError), match=message) as error:
        rows_of(values, SftConfig(**sft), **data)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"messages": None}, "no messages"),
        ({"messages": []}, "no messages"),
        ({"messages": ["hi"]}, "no messages"),
        ({"messages": [{"content": "hi"}]}, "unknown role"),
        ({"messages": [{"role": "Assistant", "content": "hi"}]}, "unknown role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "not text"),
        ({"messages": [{"role": "assistant", "value": "x"}]}, "no content"),
        ({"messages": [{"role": "assistant", "text": "x"}]}, "no content"),
        ({"messages": [ASK, {"role": "assistant", "content": None}]}, "no content"),
        ({"messages": [{**ANSWER, "tool_calls": [{"function": {}}]}]}, "tool calls"),
        ({"messages": [{**ANSWER, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, "JSON"),
        ({"messages": [{**ANSWER, "function_call": {"name": "f"}}]}, "tool calls"),
        ({"messages": [ANSWER], "tools": "{"}, "JSON"),
        ({"text": None}, "no text"),
        ({"prompt": None, "label": "x"}, "columns"),
        ({"prompt": "x", "label": "x", "tools": [TOOL]}, "columns"),
        ({"prompt": "x", "label": "x", "chat_template_kwargs": {"a": 1}}, "columns"),
        ({"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, "tokens"),  # of the next token
        ({"input_ids": [1, 2, 3], "labels": [1, 2]}, "tokens"),
        ({"input_ids": [1, -100], "labels": [1, -100]}, "tokens"),
        ({"input_ids": [1, 2.0], "labels": [1, 2]}, "tokens"),
        ({"input_ids": "[1, 2]", "labels": [1, 2]}, "tokens"),
        ({"input_ids": [1, 0], "labels": [1, -100], "attention_mask": [1, 0]}, "tokens"),
        ({"input_ids": [1, 2], "labels": [1, 2], "position_ids": [0, 0]}, "tokens"),
    ],
)
def test_a_row_with_other_values_than_its_form_needs_is_marked(values, kind) -> None:
    label = row_of(values).label
    assert isinstance(label, UnusableRowError)
    assert label.kind == kind
    assert "row dataset:0" in str(label)


@pytest.mark.parametrize("arguments", [{"a": 2}, '{"a": 2}'])
@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])])
def test_tool_calls_and_tools_are_mappings_whatever_the_file_has(arguments: Any, tools: Any) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    row = row_of({"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": [call]}], "tools": tools})
    assert row.label == Conversation([ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}], [TOOL])


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_columns_that_only_other_rows_have_are_absent(suffix: str, tmp_path: Path) -> None:
    """Files with a schema give every mapping the keys of all rows, with None for a value."""
    other = {"type": "function", "function": {"name": "sub", "arguments": {"b": 1}}}
    rows = [{"messages": [ASK, {**ANSWER, "tool_calls": [call]}], "tools": [TOOL]} for call in (CALL, other)]
    path = tmp_path / f"rows.{suffix}"
    if suffix == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        Dataset.from_list(rows).to_parquet(path)
    found = load_rows(DataConfig(prompt_data=str(path)), seed=0, sft=SftConfig())
    assert [found[i].label for i in range(2)] == [Conversation(row["messages"], [TOOL]) for row in rows]


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]
    assert row_of({"messages": [{"role": "user", "content": parts}, ANSWER]}).label == Conversation([ASK, ANSWER])


def test_nulls_of_mappings_are_removed_and_those_of_json_text_stay() -> None:
    schema = {"type": "function", "function": {"name": "add", "parameters": {"default": None}}}
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": None}}}
    chat = [ASK, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert row_of({"messages": [ASK, ANSWER], "tools": json.dumps([schema])}).label.tools == [schema]
    assert row_of({"messages": chat, "tools": [schema]}).label.tools[0]["function"]["parameters"] == {}
    calls = [{"type": "function", "function": {"name": "add", "arguments": '{"a": null}'}}]
    assert row_of({"messages": [ASK, {**ANSWER, "content": "", "tool_calls": calls}]}).label.messages == chat


@pytest.mark.parametrize("folder", [False, True])
def test_cells_of_csv_files_are_their_text(folder: bool, tmp_path: Path) -> None:
    name = tmp_path / "rows.csv"
    cells = ["None", "NA", "null", "3", "1.50", "", "[INST]"]
    name.write_text("prompt,completion\n" + "".join(f'"{i}","{cell}"\n' for i, cell in enumerate(cells)))
    rows = load_rows(DataConfig(prompt_data=str(tmp_path if folder else name)), seed=0, sft=SftConfig())
    assert [rows[i].label for i in range(len(rows))] == cells


def test_a_chat_that_a_csv_file_holds_as_json_is_a_chat(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["messages"], [json.dumps([ASK, ANSWER], indent=1)], ['[{"role" is what?']])
    data = DataConfig(prompt_data=str(path), input_key="messages", label_key="")
    assert [row.prompt for row in load_rows(data, seed=0)] == [[ASK, ANSWER], '[{"role" is what?']
    assert load_rows(DataConfig(prompt_data=str(path)), seed=0, sft=SftConfig())[0].label.messages == [ASK, ANSWER]


@pytest.mark.parametrize("kind", ["torch", "numpy"])
@pytest.mark.parametrize("sft", [None, SftConfig()])
def test_values_of_a_data_set_in_another_format_are_those_of_python(kind: str, sft: SftConfig | None) -> None:
    rows = [{"prompt": "a", "label": 7, "sizes": [1, 2], "part": {"x": 0.5}}] * 2
    table = datasets.Dataset.from_list(rows).with_format(kind)
    row = as_rows(table, DataConfig(prompt_data="x"), sft=sft)[1]
    assert (row.label, type(row.label)) == (7, int)
    assert row.metadata == rows[0]
