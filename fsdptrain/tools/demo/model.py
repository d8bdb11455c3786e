"""A letter tokenizer and a Qwen3 of 0.1 M parameters, saved for `from_pretrained`."""

import json
import string
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

QUESTION = "Spell this word backward (example: sun -> nus): "  # as in reasoning-gym
WORDS = ["<think>", "</think>", "<answer>", "</answer>", QUESTION]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}<|assistant|>{{ message.content }}<|end|>"
    "{% else %}<|user|>{{ message.content }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per printable character, and one for each of the words."""
    special = ["<|pad|>", "<|unk|>", "<|end|>", "<|user|>", "<|assistant|>"]
    vocab = {token: index for index, token in enumerate([*special, *string.printable[:95], "\n"])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<|unk|>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in words])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        unk_token="<|unk|>",
        eos_token="<|end|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=128,
    )


def save_start(target: Path, *, seed: int, words: Sequence[str] = WORDS, **sizes: int) -> Path:
    """Write the untrained model and its tokenizer, in which each word is a token. `sizes` override model.json."""
    tokenizer = build_tokenizer(words)
    default_sizes = json.loads(Path(__file__).with_name("model.json").read_text())
    torch.manual_seed(seed)
    config = Qwen3Config(
        **{**default_sizes, **sizes},
        vocab_size=len(tokenizer),
        pad_token_id=cast(int, tokenizer.pad_token_id),
        eos_token_id=cast(int, tokenizer.eos_token_id),
    )
    Qwen3ForCausalLM(config).save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target
