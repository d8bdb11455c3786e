"""Chunked logprobs over every kind of head, whole or truncated; values, and gradients by gradcheck."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdptrain.model.logprobs import chunked_logprobs
from fsdptrain.model.truncation import UNTRUNCATED, Truncation
from tests.unit.model.test_logprobs import full_logprobs

SIZES = {"num_tokens": st.integers(1, 7), "width": st.integers(1, 4), "vocab": st.integers(2, 9)}
HEADS = {
    "softcap": st.sampled_from([None, 2.0, 30.0]),
    "temperature": st.sampled_from([0.5, 1.0, 1.7]),
    "logit_scale": st.sampled_from([0.0625, 1.0, 3.0]),
    "truncation": st.sampled_from(
        [UNTRUNCATED, Truncation(top_p=0.6), Truncation(top_k=2), Truncation(min_p=0.4), Truncation(0.8, 4, 0.1)]
    ),
    "has_bias": st.booleans(),
    "chunk_size": st.integers(1, 8),
    "seed": st.integers(0, 99),
}


@settings(max_examples=60, deadline=None)
@given(**SIZES, **HEADS)
def test_values_and_gradients_are_those_of_a_full_log_softmax(
    num_tokens: int,
    width: int,
    vocab: int,
    softcap: float | None,
    temperature: float,
    logit_scale: float,
    truncation: Truncation,
    has_bias: bool,
    chunk_size: int,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(vocab, (num_tokens,), generator=generator)
    shapes = [(num_tokens, width), (vocab, width)] + [(vocab,)] * has_bias
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    bias = inputs[2] if has_bias else None
    options = {"bias": bias, "softcap": softcap, "temperature": temperature, "logit_scale": logit_scale}
    options["truncation"] = truncation
    found = chunked_logprobs(inputs[0], inputs[1], labels, chunk_size=chunk_size, with_entropy=True, **options)
    wanted = full_logprobs(inputs[0], inputs[1], labels, **options)
    upstream = [torch.randn(num_tokens, generator=generator, dtype=torch.float64) for _ in range(2)]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    ours = torch.autograd.grad(found, inputs, upstream)
    theirs = torch.autograd.grad(wanted, inputs, upstream)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


@settings(max_examples=12, deadline=None)
@given(**SIZES, **HEADS)
def test_gradients_are_the_slopes_of_the_values(
    num_tokens: int,
    width: int,
    vocab: int,
    softcap: float | None,
    temperature: float,
    logit_scale: float,
    truncation: Truncation,
    has_bias: bool,
    chunk_size: int,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(vocab, (num_tokens,), generator=generator)
    shapes = [(num_tokens, width), (vocab, width)] + [(vocab,)] * has_bias
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]

    def score(hidden: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropy = chunked_logprobs(
            hidden,
            weight,
            labels,
            bias=bias[0] if bias else None,
            softcap=softcap,
            temperature=temperature,
            logit_scale=logit_scale,
            truncation=truncation,
            chunk_size=chunk_size,
            with_entropy=True,
        )
        assert entropy is not None
        return logprobs, entropy

    assert torch.autograd.gradcheck(score, inputs)
