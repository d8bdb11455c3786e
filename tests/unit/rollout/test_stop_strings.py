"""Stop strings: a response ends with the token that completes one, however its tokens split the text."""

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from fsdptrain.data.text import response_text
from fsdptrain.rollout.stop_strings import RowStops, stop_end
from tests.testing import splitting_tokenizer

TEXT = "</a> b€é "
PARTS = [TEXT[i:j] for i in range(len(TEXT)) for j in range(i + 2, min(i + 5, len(TEXT) + 1))]


def with_byte_fallback() -> PreTrainedTokenizerFast:
    """As of Llama 2: a run of bytes is text if all of it is, and the first blank is left out."""
    tokens = ["▁", "▁b", "</a", ">▁", *(f"<0x{byte:02X}>" for byte in "é".encode())]
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    backend.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


TOKENIZERS = {"byte level": splitting_tokenizer(TEXT), "byte fallback": with_byte_fallback()}


@settings(max_examples=1000)
@given(
    name=st.sampled_from(sorted(TOKENIZERS)),
    numbers=st.lists(st.integers(0, 999), max_size=40),
    strings=st.lists(st.sampled_from([*PARTS, "bb", "éé", "é", "€"]), min_size=1, max_size=3),
    size=st.integers(1, 8),
)
@example("byte fallback", [4, 5, 4], ["é"], 1)  # an incomplete character after it hides it
def test_a_response_ends_with_the_token_that_completes_a_stop_string(name, numbers, strings, size):
    tokenizer = TOKENIZERS[name]
    ids = [number % (len(tokenizer) + 1) for number in numbers]  # the last id is no token, as of a padded embedding
    texts = [response_text(ids[:count], tokenizer, stopped=False) for count in range(len(ids) + 1)]
    expected = next((count for count, text in enumerate(texts) if any(string in text for string in strings)), None)
    assert stop_end(ids, strings, tokenizer) == expected
    rows = RowStops(strings, tokenizer, 2)
    for start in range(0, len(ids), size):
        ended = rows.ended(torch.tensor([1]), torch.tensor([ids[start : start + size]]))
        assert ended.item() == (rows.ends[1] is not None)
    assert rows.ends == [None, expected]
