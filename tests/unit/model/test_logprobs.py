"""Memory, matrix products, dtypes and range of chunked logprobs. Values: tests/properties/test_logprobs.py."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fsdptrain.model.logprobs import chunked_logprobs
from fsdptrain.types import UNTRUNCATED, Truncation
from tests.distributed.storages import LargestTensor
from tests.properties.test_logprobs import full_logprobs

T, D, V = 40, 8, 50


def head(
    num_tokens: int = T, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, bias, labels"""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in ((num_tokens, D), (V, D), (V,))]
    hidden, weight, bias = (tensor.requires_grad_() for tensor in made)
    return hidden, weight, bias, torch.randint(V, (num_tokens,), generator=generator)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("truncation", [UNTRUNCATED, Truncation(top_p=0.5, top_k=50, min_p=0.01)])
def test_no_tensor_of_the_size_of_all_logits_exists_forward_or_backward(with_entropy, truncation):
    num_tokens, width, vocab, chunk = 512, 4, 120, 128
    hidden = torch.randn(num_tokens, width, requires_grad=True)
    weight = torch.randn(vocab, width, requires_grad=True)
    labels = torch.randint(vocab, (num_tokens,))
    with LargestTensor() as watch:
        options: dict[str, Any] = {"softcap": 3.0, "temperature": 0.7, "truncation": truncation, "chunk_size": chunk}
        logprobs, entropy = chunked_logprobs(hidden, weight, labels, with_entropy=with_entropy, **options)
        (logprobs.sum() if entropy is None else logprobs.sum() + entropy.sum()).backward()
    assert weight.grad is not None
    assert watch.numel == chunk * vocab  # one chunk, not num_tokens * vocab

    with LargestTensor() as control:
        (hidden @ weight.T).log_softmax(-1)
    assert control.numel == num_tokens * vocab


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_returns_float32_within_the_rounding_of_the_logits(dtype: torch.dtype) -> None:
    hidden, weight, bias, labels = head(dtype=dtype)
    logprobs, entropy = chunked_logprobs(hidden, weight, labels, bias=bias, chunk_size=16, with_entropy=True)
    assert entropy is not None
    assert logprobs.dtype == entropy.dtype == torch.float32
    wide = [tensor.detach().float().requires_grad_() for tensor in (hidden, weight, bias)]
    wanted, wanted_entropy = full_logprobs(wide[0], wide[1], labels, bias=wide[2])
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(logprobs, wanted, rtol=0, atol=20 * eps)  # logits up to about 10
    (logprobs.sum() + entropy.sum()).backward()
    (wanted.sum() + wanted_entropy.sum()).backward()
    for found, expected in zip((hidden, weight, bias), wide, strict=True):
        assert found.grad is not None
        assert found.grad.dtype == dtype
        assert expected.grad is not None
        torch.testing.assert_close(
            found.grad.float(), expected.grad, rtol=0, atol=30 * eps * expected.grad.abs().max().item()
        )


def test_no_tokens_have_a_gradient_of_zeros() -> None:
    hidden, weight, bias, labels = head(0)
    logprobs, _ = chunked_logprobs(hidden, weight, labels, bias=bias)
    gradients = torch.autograd.grad(logprobs.sum(), (hidden, weight, bias))
    assert [gradient.shape for gradient in gradients] == [hidden.shape, weight.shape, bias.shape]
    assert all((gradient == 0).all() for gradient in gradients)


def test_the_gradient_of_a_bias_is_summed_in_float32() -> None:
    """In bfloat16, a sum of 4096 ones would stop at 256."""
    num_tokens = 4096
    hidden, weight = torch.zeros(num_tokens, D, dtype=torch.bfloat16), torch.zeros(2, D, dtype=torch.bfloat16)
    bias = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    logprobs, _ = chunked_logprobs(hidden, weight, torch.zeros(num_tokens).long(), bias=bias, chunk_size=1)
    logprobs.sum().backward()
    assert bias.grad is not None
    assert bias.grad.tolist() == [num_tokens / 2, -num_tokens / 2]  # the logprob of one of two equal tokens


def test_a_bias_of_minus_infinity_excludes_a_token() -> None:
    hidden, weight, bias, labels = (x.detach() for x in head())
    gone = (int(labels.max()) + 1) % len(weight)
    assert gone not in labels
    logprobs, entropy = chunked_logprobs(
        hidden, weight, labels, bias=bias.index_fill(0, torch.tensor(gone), -torch.inf), with_entropy=True
    )
    assert entropy is not None
    rest = [i for i in range(len(weight)) if i != gone]
    expected = (hidden @ weight[rest].T + bias[rest]).log_softmax(-1)
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1))
    places = labels - (labels > gone).long()
    torch.testing.assert_close(logprobs, expected.gather(1, places[:, None])[:, 0])


@pytest.mark.parametrize("truncation", [UNTRUNCATED, Truncation(top_p=0.9, top_k=20, min_p=1e-3)])
def test_logits_of_any_size_stay_finite(truncation: Truncation) -> None:
    hidden, weight, _, labels = head()
    logprobs, entropy = chunked_logprobs(hidden * 1e4, weight, labels, truncation=truncation, with_entropy=True)
    assert entropy is not None
    gradient = torch.autograd.grad(logprobs.sum() * 1e5 + entropy.sum() * 1e5, weight)[0]
    assert all(x.isfinite().all() for x in (logprobs, entropy, gradient))
