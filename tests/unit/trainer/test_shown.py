"""Rows of logged samples: every token has its own text and numbers."""

from dataclasses import replace

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from fsdptrain.trainer.shown import MOST_TOKENS, Shown, as_row, show, token_texts
from fsdptrain.types import Prompt, Sample
from tests.testing import tiny_tokenizer

SAMPLE = Sample(
    group_id="g", token_ids=[10, 11, 12, 13, 14, 15], loss_mask=[False, False, True, True, False, True],
    rollout_logprobs=[0.0, 0.0, -1.0, -2.0, 0.0, -3.00004],
)  # fmt: skip


@pytest.mark.parametrize("text", ["plain", "é, 漢字 and 🙂!", "<|user|>x\n"])
def test_texts_of_tokens_join_to_the_text(text):
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode(text)
    texts = token_texts(tokenizer, ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == text


def test_a_character_is_at_its_last_token_and_bytes_of_none_are_shown():
    tokenizer = tiny_tokenizer()
    smile = tokenizer.encode("🙂")
    assert token_texts(tokenizer, smile) == ["", "", "", "🙂"]
    assert token_texts(tokenizer, [*smile[:2], *tokenizer.encode("ab")]) == ["\ufffd", "\ufffd", "a", "b"]
    assert token_texts(tokenizer, smile[:3])[-1] != ""


def test_a_decoder_that_drops_the_first_space_keeps_those_between_words():
    backend = Tokenizer(models.WordLevel({"▁the": 0, "▁cat": 1, "s": 2, "<unk>": 3}, unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert tokenizer.decode([1]) == "cat"
    assert token_texts(tokenizer, [0, 1, 2, 0]) == ["the", " cat", "s", " the"]


def test_tokens_of_an_environment_have_no_numbers_and_a_failed_episode_its_error():
    row = as_row(show([Prompt("g", [1], "")], ["x"], [replace(SAMPLE, error="no host")], 1)[0], tiny_tokenizer(), 0.5)
    assert row["error"] == "no host"
    assert row["rollout_logprobs"] == [-1.0, -2.0, None, -3.0]
    assert row["advantage"] == 0.5


def test_a_long_sample_is_cut():
    count = MOST_TOKENS + 5
    long = Sample("g", [10] * count, [False] + [True] * (count - 1), [-1.0] * count)
    assert len(as_row(Shown({}, long), tiny_tokenizer())["tokens"]) == MOST_TOKENS
    assert as_row(Shown({"x": 1}, Sample("g", [1], [False], [0.0])), tiny_tokenizer()) == {"x": 1}
