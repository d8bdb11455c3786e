"""Rows of files, folders, Python and reasoning_gym, and their split."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from fsdptrain.config import DataConfig
from fsdptrain.data.held_out import split_rows
from fsdptrain.data.rows import Row, content_hash
from fsdptrain.data.sources import load_rows
from fsdptrain.data.tables import as_rows, environment_rows
from fsdptrain.errors import ConfigError, DataError
from tests.testing import write_rows

ROWS = [{"prompt": f"question {i}", "label": str(i), "extra": {"level": i}} for i in range(7)]


def config(prompt_data: object, **values: Any) -> DataConfig:
    return DataConfig(prompt_data=str(prompt_data), **values)


FORMS = ["jsonl", "json", "csv", "parquet", "arrow", "folder", "folder of splits", "folder of files", "list"]


@pytest.fixture(params=FORMS)
def rows(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same rows in every form that they may come in."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    table = datasets.Dataset.from_list(ROWS)
    path = tmp_path / "rows"
    if request.param == "jsonl":
        path = path.with_suffix(".jsonl")
        write_rows(path, ROWS)
    elif request.param == "parquet":
        path = path.with_suffix(".parquet")
        table.to_parquet(path)
    elif request.param == "json":
        path = path.with_suffix(".json")
        path.write_text(json.dumps(ROWS))
    elif request.param == "csv":
        path = path.with_suffix(".csv")
        table.remove_columns("extra").to_csv(path)
        return load_rows(config(path), seed=0)
    elif request.param == "arrow":
        table.save_to_disk(path)
        [path] = path.glob("*.arrow")
    elif request.param == "folder of files":
        path.mkdir()
        for number, part in enumerate((ROWS[:4], ROWS[4:])):
            write_rows(path / f"train-{number}.jsonl", part)
        (path / "test.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    elif request.param == "folder":
        table.save_to_disk(path)
    elif request.param == "folder of splits":
        datasets.DatasetDict(train=table, test=table.select([0])).save_to_disk(path)
    else:
        return as_rows(ROWS, config("x"))
    return load_rows(config(path), seed=0)


def test_rows_do_not_depend_on_the_file_format(rows: Any) -> None:
    assert len(rows) == 7
    assert [(row.prompt, row.label) for row in (rows[i] for i in range(7))] == [
        (row["prompt"], row["label"]) for row in ROWS
    ]
    if "extra" in rows[0].metadata:  # csv files hold no mappings
        assert [rows[i].metadata for i in range(7)] == ROWS
    assert len({rows[i].id for i in range(7)}) == 7


def test_metadata_are_all_columns_but_images(caplog: pytest.LogCaptureFixture) -> None:
    with_images = [{**row, "picture": []} for row in ROWS]
    assert as_rows(with_images, config("x"), image_key="picture")[3].metadata == ROWS[3]
    assert as_rows(ROWS, config("x"))[3].metadata == ROWS[3]
    assert not caplog.text
    as_rows([{**ROWS[0], "functions": [{"name": "add"}], "documents": None}], config("x"))
    assert "--prompt-data dataset: no prompt shows the column functions or documents: write it" in caplog.text


def test_the_split_of_a_saved_data_set_can_be_chosen(tmp_path: Path) -> None:
    table = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict(train=table, test=table.select([4])).save_to_disk(tmp_path / "d")
    assert load_rows(config(f"{tmp_path / 'd'}?split=test"), seed=0)[0].prompt == "question 4"
    assert len(load_rows(config(tmp_path / "d"), seed=0)) == 7
    with pytest.raises(DataError, match=r"split=dev: it has only train, test"):
        load_rows(config(f"{tmp_path / 'd'}?split=dev"), seed=0)
    table.save_to_disk(tmp_path / "one")
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    for name, message in (("one", "has no split"), ("rows.jsonl", "no option 'split'; a file takes none")):
        with pytest.raises(ConfigError, match=message):
            load_rows(config(f"{tmp_path / name}?split=train[:1]"), seed=0)


def test_rows_of_python_objects() -> None:
    chat, mine = [{"role": "user", "content": "hello"}], [Row("x", "hello")]
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    for given in (chat, [{"role": "user", "content": parts}]):
        assert as_rows([{"prompt": given, "label": 1}], config("x"))[0].prompt == chat
    assert as_rows(mine, config("x")) is mine
    assert as_rows([{"prompt": "x"}], config("x", label_key=""))[0].label is None
    assert [row.label for row in environment_rows([{"prompt": "x"}, {"prompt": "x", "label": 1}])] == [None, 1]


def test_a_key_after_a_dot_names_a_value_in_a_column_of_mappings() -> None:
    """As in data sets for verl, e.g. BytedTsinghua-SIA/DAPO-Math-17k. A column with a dot in its name comes first."""
    row = {"prompt": "a", "reward_model": {"ground_truth": "34", "style": "rule"}, "x.y": "b", "x": {"y": "c"}}
    assert as_rows([row], config("x", label_key="reward_model.ground_truth"))[0].label == "34"
    assert as_rows([row], config("x", label_key="x.y"))[0].label == "b"
    assert as_rows([row], config("x", input_key="reward_model.style", label_key=""))[0].prompt == "rule"
    for wrong in ("reward_model.truth", "prompt.a", "reward_model."):
        with pytest.raises(DataError, match=f"--label-key '{wrong}' is not a column"):
            as_rows([row], config("x", label_key=wrong))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"input_key": "promt"}, "--input-key 'promt' is not a column .* did you mean 'prompt'.*prompt, label, extra"),
        ({"label_key": "answer"}, "--label-key 'answer' .* prompt, label, extra, or --label-key \"\""),
    ],
)
def test_a_wrong_column_is_an_error_that_lists_the_columns(values: dict[str, str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        as_rows(ROWS, config("x", **values))


@pytest.mark.parametrize("prompt", [None, 3, [], ["text"], [{"role": "user"}], [{"role": "user", "content": None}],
                                    [{"role": "user", "content": 5}], [{"role": 5, "content": "text"}],
                                    [{"role": "user", "content": [{"type": "image"}]}], "[{'role': 'x'}]"])  # fmt: skip
def test_an_invalid_prompt_is_an_error_with_the_row(prompt: object) -> None:
    rows = as_rows([{"prompt": "x", "label": 1}, {"prompt": prompt, "label": 1}], config("x"), name="mine")
    with pytest.raises(DataError, match=r"row mine:1, counted from 0.* holds"):
        rows[1]
    for dataset, message in (
        ([], "mine has no rows"),
        ([{}], "'prompt' is not a column of --prompt-data mine; its first row is empty"),
        (iter([{"prompt": "x"}]), "mine is a list_iterator, without a length: pass a Dataset or a list"),
    ):
        with pytest.raises(DataError, match=message):
            as_rows(dataset, config("x"), name="mine")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.jsonl", None, "--prompt-data .*gone.jsonl: file not found"),
        ("empty.jsonl", "", "has no rows"),
        ("broken.jsonl", '{"prompt": "a"}\nfoo', r"broken.jsonl:2 is not JSON: Expecting"),
        ("null.jsonl", 'null\n{"prompt": "a"}\n', r"null.jsonl:1 holds null, not an object"),
        ("list.jsonl", '{"prompt": "a"}\n[1]\n', r"list.jsonl:2 holds \[1\], not an object"),
        ("broken.parquet", "foo", "cannot be read: "),
        ("wide.csv", "prompt,label\na,1,b\n", "cannot be read: Length of header"),
        ("twice.csv", "prompt,label,prompt\na,1,b\n", "cannot be read: twice.csv has 'prompt' twice"),
        ("twice.jsonl", '{"a": 1}\n{"a": 1, "a": 2}', "twice.jsonl:2 is not JSON: an object has 'a' twice"),
        ("twice.json", '[{"a": {"y": 1, "y": 2}}]', "twice.json cannot be read: an object has 'y' twice"),
        ("nofolder/at_all", None, "cannot be read: "),
        ("latin.jsonl", b'{"prompt": "\xe9"}\n', r"latin\.jsonl:1 is not JSON: 'utf-8' codec can't decode"),
        ("table.tsv", "prompt\na\n", r"table\.tsv: its name must end in \.jsonl, \.json, \.csv, \.parquet, \.arrow"),
    ],
)
def test_data_that_cannot_be_read_is_one_line(name, content, message, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message) as error:
        load_rows(config(name), seed=0)
    assert "\n" not in str(error.value)


def test_csv_files_of_a_split_that_differ_in_columns_are_refused(tmp_path: Path) -> None:
    for name, columns in (("train-1", "prompt,label"), ("train-2", "prompt,label"), ("test", "prompt")):
        (tmp_path / f"{name}.csv").write_text(f"{columns}\n{columns}\n")
    assert len(load_rows(config(tmp_path), seed=0)) == 2
    assert load_rows(config(f"{tmp_path}?split=test[:1]", label_key=""), seed=0)[0].metadata == {"prompt": "prompt"}
    for split, message in (
        ("train+test", r"(train-1|test)\.csv differ in their columns"),
        ("dev", "no split dev, only train, test"),
    ):
        with pytest.raises(DataError, match=message):
            load_rows(config(f"{tmp_path}?split={split}"), seed=0)


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_labels_of_several_types_are_what_the_file_says(tmp_path: Path, suffix: str) -> None:
    labels = ["007", 7, "1.50", "true", "null", None, "[1, 2]", "1e3", 3, 3.5, 2**63 + 1, "2024-05-06", {"a": 1}]
    rows = [json.dumps({"prompt": str(i), "label": label}) for i, label in enumerate(labels)]
    path = tmp_path / f"rows{suffix}"
    path.write_text("\n".join(rows) if suffix == ".jsonl" else f"[{', '.join(rows)}]")
    loaded = load_rows(DataConfig(prompt_data=str(path)), seed=0)
    assert [loaded[i].label for i in range(len(loaded))] == labels


def test_reasoning_gym_rows_carry_what_their_scorer_needs() -> None:
    rows = load_rows(config("reasoning_gym:spell_backward?size=50"), seed=3)
    entry = rows[7].metadata["entry"]
    assert len(rows) == 50
    assert (rows[7].prompt, rows[7].label) == (entry["question"], entry["answer"])
    assert rows[7].metadata["task"] == "spell_backward"
    assert rows[7] == load_rows(config("reasoning_gym:spell_backward?size=50"), seed=3)[7]
    assert rows[7].prompt != load_rows(config("reasoning_gym:spell_backward?size=50"), seed=4)[7].prompt


def test_reasoning_gym_takes_typed_parameters_and_lists() -> None:
    rows = load_rows(config("reasoning_gym:spell_backward?min_word_len=4&max_word_len=4&size=9"), seed=0)
    assert [len(rows[i].label) for i in range(len(rows))] == [4] * 9
    rows = load_rows(config("reasoning_gym:basic_arithmetic?operators=[+]&allow_negation=false&size=30"), seed=0)
    assert not any("*" in str(rows[i].prompt) or "/" in str(rows[i].prompt) for i in range(30))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("spel_backward", "no task 'spel_backward'; did you mean 'spell_backward'"),
        ("spell_backward?max_len=3", "no parameter 'max_len'.*it takes .*max_word_len"),
        ("spell_backward?max_word_len=2", "does not take .*max_word_len must be >= min_word_len"),
        ("spell_backward?max_word_len=many", "does not take .*'max_word_len': 'many'"),
        ("spell_backward?max_word_len=1e-3", "does not take .*'max_word_len': 0.001"),
        ("spell_backward?max_word_len", "'max_word_len' after . must be name=value"),
        ("spell_backward?max_word_len=[", "is not a YAML value"),
        (f"spell_backward?size={'[' * 3000}", "is not a YAML value"),
        (f"spell_backward?size={'9' * 5000}", "is not a YAML value"),
        ("spell_backward?size=a", "does not take .*'size': 'a'"),
    ],
)
def test_a_task_or_parameter_that_does_not_exist_is_an_error(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        load_rows(config(f"reasoning_gym:{spec}"), seed=0)
    assert "\n" not in str(error.value)


def test_generated_rows_are_lazy() -> None:
    """A row of knight_swap takes up to two seconds, so this ends only if no other row is made."""
    rows = load_rows(config("reasoning_gym:knight_swap?size=1000000000"), seed=0)
    assert len(rows) == 10**9
    assert rows[10**8].id == "knight_swap:100000000"
    with pytest.raises(IndexError):
        rows[10**9]


def test_training_and_evaluation_rows_are_disjoint_and_complete() -> None:
    rows = as_rows(ROWS, config("x"))
    train, evaluation = split_rows(rows, 3, seed=5)
    held_out = {row.id for row in evaluation}
    assert len(held_out) == 3
    assert held_out | {train[i].id for i in range(len(train))} == {f"dataset:{i}" for i in range(7)}
    assert [row.id for row in split_rows(rows, 3, seed=5)[1]] == [row.id for row in evaluation]
    assert split_rows(rows, 0, seed=5)[1] == []


def test_eval_rows_are_all_different() -> None:
    rows = as_rows([{"prompt": f"{i % 10}", "label": ""} for i in range(200)], config("x"))
    _, evaluation = split_rows(rows, 8, seed=0)
    assert len({content_hash(row) for row in evaluation}) == len(evaluation) == 8


def test_an_eval_size_without_training_rows_is_an_error() -> None:
    with pytest.raises(DataError, match="--eval-size 128 leaves no training rows, the data has 7 rows"):
        split_rows(as_rows(ROWS, config("x")), 128, seed=0)


def test_the_content_hash_depends_on_the_prompt_only() -> None:
    same = [Row("a", "hello", 1), Row("b", " hello\n", 2), Row("c", [{"role": "user", "content": "hello"}])]
    assert len({content_hash(row) for row in same}) == 1
    assert content_hash(Row("a", "hello!")) != content_hash(same[0])
    assert content_hash(Row("a", [{"role": "system", "content": "hello"}])) != content_hash(same[0])
