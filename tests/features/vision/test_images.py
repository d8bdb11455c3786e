"""Images in rows, and their placeholders in a prompt."""

import io
import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset, Features, Image, Sequence, Value
from hypothesis import given
from hypothesis import strategies as st

from fsdptrain.config import DataConfig, RolloutConfig
from fsdptrain.data.images import as_images, open_image, with_image_positions
from fsdptrain.data.prompts import PromptStream, make_prompt
from fsdptrain.data.rows import Row, content_hash
from fsdptrain.data.sources import load_rows
from fsdptrain.errors import ConfigError, DataError
from fsdptrain.features.vision.processor import ImageProcessor
from tests import vision_zoo as zoo
from tests.testing import save_tiny_checkpoint

DATA = {"input_key": "question", "label_key": "answer", "system_prompt": ""}


def encoded(color: tuple[int, int, int]) -> bytes:
    buffer = io.BytesIO()
    zoo.picture(color).save(buffer, format="PNG")
    return buffer.getvalue()


RED = encoded((255, 0, 0))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return zoo.save(tmp_path_factory.mktemp("model"), "qwen3_vl")


@pytest.fixture(scope="module")
def processor(checkpoint: Path) -> ImageProcessor:
    return ImageProcessor(checkpoint, trust_remote_code=False, image_key="images")


def prompt_of(row: Row, processor: ImageProcessor, **data):
    return make_prompt(row, zoo.tokenizer("qwen3_vl"), data=DataConfig(**{**DATA, **data}), processor=processor)


def test_a_picture_is_the_same_in_every_form(tmp_path: Path):
    (tmp_path / "red.png").write_bytes(RED)
    forms = ["red.png", str(tmp_path / "red.png"), {"bytes": RED, "path": None}, {"bytes": None, "path": "red.png"}]
    for form in [*forms, RED, zoo.picture((255, 0, 0))]:
        [value] = as_images(form, tmp_path)
        assert open_image(value, row_id="r", column="images").tobytes() == zoo.picture((255, 0, 0)).tobytes()


def test_files_of_all_kinds_hold_the_same_rows(tmp_path: Path, processor: ImageProcessor):
    (tmp_path / "red.png").write_bytes(RED)
    (tmp_path / "a.jsonl").write_text(json.dumps({"question": "<image>?", "answer": "red", "images": ["red.png"]}))
    columns = {"question": ["<image>?"], "answer": ["red"], "images": [[{"bytes": RED, "path": None}]]}
    features = Features(question=Value("string"), answer=Value("string"), images=Sequence(Image()))
    Dataset.from_dict(columns, features=features).to_parquet(tmp_path / "a.parquet")
    Dataset.from_dict(columns, features=features).save_to_disk(tmp_path / "saved")
    prompts = []
    for name in ("a.jsonl", "a.parquet", "saved"):
        rows = load_rows(DataConfig(**DATA, prompt_data=str(tmp_path / name)), seed=0, image_key="images")
        prompts.append(prompt_of(rows[0], processor))
    for prompt in prompts:
        assert prompt.token_ids == prompts[0].token_ids
        assert torch.equal(prompt.images.inputs["pixel_values"], prompts[0].images.inputs["pixel_values"])


@given(st.lists(st.sampled_from(["<image>", "a", "b "]), max_size=6))
def test_placeholders_are_at_the_marks(words: list[str]):
    count = words.count("<image>")
    [message] = with_image_positions([{"role": "user", "content": "".join(words)}], count, row_id="r")
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    assert "".join("<image>" if part["type"] == "image" else part["text"] for part in parts) == "".join(words)


def test_images_without_a_mark_come_first():
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]
    system, user = with_image_positions(chat, 2, row_id="r")
    assert system["content"] == "S"
    assert user["content"] == [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "Q"}]


@pytest.mark.parametrize(
    ("content", "count", "words"),
    [
        ("<image><image>", 1, "row r has 1 images, and its prompt has 2 image positions"),
        ("<image>", 0, "row r has 0 images"),
        ([{"type": "video"}], 0, "videos are not supported"),
    ],
)
def test_another_number_of_placeholders_is_an_error(content, count: int, words: str):
    with pytest.raises(DataError, match=words):
        with_image_positions([{"role": "user", "content": content}], count, row_id="r")


@pytest.mark.parametrize(
    ("value", "words"), [(b"no picture", "cannot be read"), (3.5, "holds a float"), ("x.png", "No")]
)
def test_a_value_that_is_no_image_is_an_error_with_the_row(processor: ImageProcessor, value, words: str):
    row = Row("r7", "<image>?", images=as_images(value, Path("/nowhere")))
    with pytest.raises(DataError, match=rf"row r7.*{words}"):
        prompt_of(row, processor)


def test_a_prompt_has_the_tokens_of_its_images_at_the_placeholders(processor: ImageProcessor):
    row = Row("r", "a<image>b<image>", images=(zoo.picture((1, 2, 3), (16, 16)), zoo.picture((9, 9, 9), (32, 16))))
    prompt = prompt_of(row, processor)
    assert prompt.images is not None
    assert prompt.images.inputs["image_grid_thw"].tolist() == [[1, 4, 4], [1, 4, 8]]
    assert prompt.images.token_types.tolist() == [int(token == zoo.IMAGE_TOKEN_ID) for token in prompt.token_ids]
    assert prompt.images.token_types.sum() == 4 + 8
    text_alone = prompt_of(Row("t", "ab"), processor)
    assert text_alone.images is None
    assert len(prompt.token_ids) == len(text_alone.token_ids) + 4 + 8 + 2 * 2  # what begins and ends a picture


def test_an_image_token_in_the_text_is_an_error(processor: ImageProcessor):
    with pytest.raises(DataError, match="cannot render row r"):
        prompt_of(Row("r", "<|image_pad|>"), processor)


def test_image_tokens_count_for_the_prompt_limit(processor: ImageProcessor):
    rows = [Row("long", "q", images=(zoo.picture((1, 1, 1), (32, 32)),)), Row("short", "q")]
    length = len(prompt_of(rows[1], processor).token_ids)
    options = {"data": DataConfig(**DATA, prompt_data="x"), "rollout": RolloutConfig(max_prompt_len=length)}
    stream = PromptStream(rows, zoo.tokenizer("qwen3_vl"), processor=processor, **options)
    assert [prompt.id.partition("@")[0] for prompt in stream.next(3)] == ["short"] * 3
    assert stream.num_too_long >= 2


def test_the_content_hash_of_a_row_includes_its_images():
    rows = [Row("a", "q", images=(picture,)) for picture in (RED, encoded((0, 0, 255)), {"bytes": RED})]
    first, second, third = map(content_hash, rows)
    assert first != second
    assert first == third


def test_a_model_of_text_alone_has_no_image_processor(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"--image-key: .* has no image processor"):
        ImageProcessor(save_tiny_checkpoint(tmp_path), trust_remote_code=False, image_key="images")
