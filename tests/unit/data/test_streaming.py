"""Prompts of streams: every row once in an epoch, shuffled in blocks, resumed exactly."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from fsdptrain.config import DataConfig, RolloutConfig
from fsdptrain.data.streaming import RowStream, StreamedPrompts, open_stream
from fsdptrain.data.tables import row_reader
from fsdptrain.errors import ConfigError, DataError
from tests.testing import tiny_tokenizer

COUNT = 23
ROWS = [{"prompt": f"question {i}", "label": str(i)} for i in range(COUNT)]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


@pytest.fixture(scope="module", params=["jsonl", "shards of parquet", "saved"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    table = datasets.Dataset.from_list(ROWS)
    if request.param == "jsonl":
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        return folder / "rows.jsonl"
    if request.param == "saved":
        table.save_to_disk(folder / "saved")
        return folder / "saved"
    for number in range(3):
        table.shard(3, number, contiguous=True).to_parquet(folder / "shards" / f"train-{number}.parquet")
    return folder / "shards"


def data_of(path: object) -> DataConfig:
    return DataConfig(prompt_data=str(path), prompt_data_streaming=True)


def stream(path: Path, tokenizer: Any, *, buffer: int = 5, skip: int = 0, **options: Any) -> StreamedPrompts:
    data = data_of(path)
    rows = open_stream(data, image_key=None, sft=None)
    rows = rows.split(skip)[0] if skip else rows
    limit = options.pop("max_prompt_len", None)
    rollout = RolloutConfig(**options)
    return StreamedPrompts(rows, tokenizer, data=data, rollout=rollout, max_prompt_len=limit, block_size=buffer)


def labels(prompts: list[Any]) -> list[int]:
    return [int(prompt.label) for prompt in prompts]


@pytest.mark.parametrize("buffer", [1, 5, 100])
def test_each_epoch_has_every_row_once_shuffled_within_blocks(path: Path, tokenizer: Any, buffer: int) -> None:
    found = stream(path, tokenizer, buffer=buffer).next(2 * COUNT)
    epochs = [labels(found[:COUNT]), labels(found[COUNT:])]
    for epoch in epochs:
        blocks = [epoch[start : start + buffer] for start in range(0, COUNT, buffer)]
        assert [sorted(block) for block in blocks] == [
            list(range(start, min(start + buffer, COUNT))) for start in range(0, COUNT, buffer)
        ]
    assert (epochs[0] != epochs[1]) == (buffer > 1)
    assert len({prompt.id for prompt in found}) == 2 * COUNT
    assert labels(stream(path, tokenizer, buffer=buffer, shuffle=False).next(COUNT + 2)) == [*range(COUNT), 0, 1]
    assert found == stream(path, tokenizer, buffer=buffer).next(2 * COUNT)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    drawn=st.integers(0, 2 * COUNT + 3), recorded=st.sets(st.integers(0, 2 * COUNT)), again=st.integers(0, 7),
    skip=st.sampled_from([0, 4]),
)  # fmt: skip
def test_a_resumed_stream_equals_an_uninterrupted_one(path, tokenizer, drawn, recorded, again, skip) -> None:
    """With prompts pending in any order, and a second restart while they are drawn again."""
    whole = stream(path, tokenizer, skip=skip)
    first = stream(path, tokenizer, skip=skip)
    begun = first.next(drawn)
    assert begun == whole.next(drawn)
    for number, prompt in enumerate(begun):
        if number in recorded:
            first.record(prompt)
    pending = [prompt for number, prompt in enumerate(begun) if number not in recorded]
    second = stream(path, tokenizer, skip=skip, seed=7)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.next(again)
    third = stream(path, tokenizer, skip=skip)
    third.load_state_dict(json.loads(json.dumps(second.state_dict())))
    expected = pending + whole.next(max(0, again - len(pending)) + 30)
    assert third.next(len(pending) + 30) == expected[: len(pending) + 30]


def test_rows_are_read_as_they_are_needed(tokenizer: Any) -> None:
    read = []

    def rows() -> Any:
        for i in range(10**9):
            read.append(i)
            yield {"prompt": f"{i}", "label": i}

    table = datasets.IterableDataset.from_generator(rows)
    data = data_of("x")
    prompts = StreamedPrompts(
        RowStream(table, row_reader({"prompt": "", "label": 0}, data, where=""), "x"), tokenizer,
        data=data, rollout=RolloutConfig(), block_size=4,
    )  # fmt: skip
    prompts.next(6)
    assert len(read) <= 8 + 1


def test_held_out_rows_are_the_first_and_have_their_numbers(path: Path, tokenizer: Any) -> None:
    rows, held_out = open_stream(data_of(path), image_key=None, sft=None).split(3)
    assert [row.id.rpartition(":")[2] for row in held_out] == ["0", "1", "2"]
    prompts = StreamedPrompts(rows, tokenizer, data=data_of(path), rollout=RolloutConfig()).next(COUNT - 3)
    assert sorted(labels(prompts)) == list(range(3, COUNT))
    assert all(prompt.id.endswith(f":{prompt.label}") for prompt in prompts)
    with pytest.raises(DataError, match="--eval-size 30 leaves no training rows, the data has 23 rows"):
        open_stream(data_of(path), image_key=None, sft=None).split(30)


def test_what_cannot_be_streamed_is_one_line(path: Path, tokenizer: Any, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(DataError, match="has no rows"):
        open_stream(data_of(empty), image_key=None, sft=None)
    with pytest.raises(DataError, match="'prompt' is not a column"):
        (tmp_path / "other.jsonl").write_text('{"a": 1}\n')
        open_stream(data_of(tmp_path / "other.jsonl"), image_key=None, sft=None)
    with pytest.raises(ConfigError, match="no option 'size'"):
        open_stream(data_of(f"{path}?size=3"), image_key=None, sft=None)
    with pytest.raises(DataError, match="none of 23 rows can be trained on, 23 are longer than 3 tokens"):
        stream(path, tokenizer, max_prompt_len=3).next(1)
