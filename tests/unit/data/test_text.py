"""Text becomes the same tokens, and tokens the same text, for prompts, samples, rewards, environments and agents."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from fsdptrain.config import DataConfig
from fsdptrain.data.prompts import make_prompt
from fsdptrain.data.rows import Row
from fsdptrain.data.text import plain_tokens, response_text
from fsdptrain.errors import DataError
from fsdptrain.trainer.tokenizer import load_tokenizer
from tests.testing import save_tiny_checkpoint, tiny_tokenizer

WORDS = ["x", "!=", "y", ".", "<s>", "</s>", "<think>", "</think>", "<unk>"]


def words(template: str) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece(cleanup=False)
    added = [(word, WORDS.index(word)) for word in ("<s>", "</s>") if word in template]
    backend.post_processor = TemplateProcessing(single=template, special_tokens=added)
    special = ["<think>", "</think>"]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", additional_special_tokens=special
    )


@pytest.mark.parametrize("template", ["<s> $A </s>", "<s> $A", "$A </s>", "$A"])
@pytest.mark.parametrize("text", ["x != y", "<s> x", "x </s>", "</s>", ""])
def test_a_plain_prompt_begins_with_bos_once_and_never_ends_with_an_added_eos(template: str, text: str) -> None:
    tokenizer = words(template)
    bos = ["<s>"] if template.startswith("<s>") and not text.startswith("<s>") else []
    assert tokenizer.convert_ids_to_tokens(plain_tokens(text, tokenizer)) == [*bos, *text.split()]


def test_a_response_keeps_its_special_tokens_but_the_one_that_stopped_it() -> None:
    tokenizer = words("$A")
    ids = [WORDS.index(word) for word in ("<think>", "x", "</think>", "y", "</s>")]
    assert response_text(ids, tokenizer, stopped=True).split() == ["<think>", "x", "</think>", "y"]
    assert response_text(ids[:3], tokenizer, stopped=False).split() == ["<think>", "x", "</think>"]


def test_a_loaded_tokenizer_decodes_exactly(tmp_path) -> None:
    save_tiny_checkpoint(tmp_path)
    tokenizer = words("$A")
    tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"clean_up_tokenization_spaces": True}))
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    loaded = load_tokenizer(tmp_path, trust_remote_code=False)
    assert loaded.decode([0, 1, 2, 3]) == "x != y ."


@pytest.mark.parametrize("change", ["{{ m.content | trim }}", "{{ m.content.split('</think>')[-1] }}", ""])
def test_a_row_whose_prefilled_turn_the_template_changes_is_named(change: str) -> None:
    tokenizer = tiny_tokenizer()
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "<think>a</think> so "}]
    plain = make_prompt(Row("a", messages), tokenizer, data=DataConfig())
    assert plain.text.endswith("<think>a</think> so ")
    tokenizer.chat_template = "{% for m in messages %}" + (change or "{{ m.role }}") + "{% endfor %}"
    with pytest.raises(DataError, match="cannot render row a: "):
        make_prompt(Row("a", messages), tokenizer, data=DataConfig())
