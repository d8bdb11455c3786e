"""Chunked logprobs equal a full log-softmax, in value and gradient, without its memory."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdptrain.model.logprobs import chunked_logprobs
from fsdptrain.model.truncation import UNTRUNCATED, Truncation
from tests.unit.model.test_truncation import head_of

T, D, V = 40, 8, 50


def full_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    truncation: Truncation = UNTRUNCATED,
) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.T
    logits = (logits if bias is None else logits + bias) * logit_scale
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    rows = [_of_row(z, label, truncation) for z, label in zip(logits / temperature, labels, strict=True)]
    return torch.stack([logprob for logprob, _ in rows]), torch.stack([entropy for _, entropy in rows])


def _of_row(z: Tensor, label: Tensor, truncation: Truncation) -> tuple[Tensor, Tensor]:
    """Logprob and entropy over the head that sampling leaves, down to the label: of a vector of its own."""
    floor = min(z[list(head_of(z.tolist(), truncation))].min().item(), z[label].item())
    head = [i for i in range(len(z)) if z[i].item() >= floor]
    logp = z[head].log_softmax(-1)
    return logp[head.index(int(label))], -(logp.exp() * logp).sum()


def head(
    num_tokens: int = T, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, bias, labels"""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in ((num_tokens, D), (V, D), (V,))]
    hidden, weight, bias = (tensor.requires_grad_() for tensor in made)
    return hidden, weight, bias, torch.randint(V, (num_tokens,), generator=generator)


class LargestTensor(TorchDispatchMode):
    """The largest number of elements that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = out if isinstance(out, tuple | list) else (out,)
        self.numel = max([self.numel, *(tensor.numel() for tensor in made if isinstance(tensor, Tensor))])
        return out


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("truncation", [UNTRUNCATED, Truncation(top_p=0.5, top_k=50, min_p=0.01)])
def test_no_tensor_of_the_size_of_all_logits_exists_forward_or_backward(
    with_entropy: bool, truncation: Truncation
) -> None:
    num_tokens, width, vocab, chunk = 512, 4, 120, 128
    hidden = torch.randn(num_tokens, width, requires_grad=True)
    weight = torch.randn(vocab, width, requires_grad=True)
    labels = torch.randint(vocab, (num_tokens,))
    with LargestTensor() as watch:
        logprobs, entropy = chunked_logprobs(
            hidden,
            weight,
            labels,
            softcap=3.0,
            temperature=0.7,
            truncation=truncation,
            chunk_size=chunk,
            with_entropy=with_entropy,
        )
        (logprobs.sum() if entropy is None else logprobs.sum() + entropy.sum()).backward()
    assert weight.grad is not None
    assert watch.numel == chunk * vocab  # one chunk, not num_tokens * vocab

    with LargestTensor() as control:
        (hidden @ weight.T).log_softmax(-1)
    assert control.numel == num_tokens * vocab


@pytest.mark.parametrize("chunk_size", [1, 7, 39, 40, 1000])
@pytest.mark.parametrize("truncation", [UNTRUNCATED, Truncation(top_p=0.5)])
def test_the_chunk_size_changes_nothing(chunk_size: int, truncation: Truncation) -> None:
    hidden, weight, bias, labels = head(dtype=torch.float64)
    results = []
    for size in (chunk_size, T):
        logprobs, entropy = chunked_logprobs(
            hidden, weight, labels, bias=bias, truncation=truncation, chunk_size=size, with_entropy=True
        )
        assert entropy is not None
        grads = torch.autograd.grad((logprobs * entropy).sum(), (hidden, weight, bias))
        results.append((logprobs, entropy, *grads))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("truncation", [UNTRUNCATED, Truncation(top_p=0.5)])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_how_many_rows_a_cache_holds_changes_nothing(
    softcap: float | None, truncation: Truncation, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, weight, bias, labels = head(dtype=torch.float64)
    results = []
    for logits in (1, 3 * V, 10**9):
        monkeypatch.setattr("fsdptrain.model.logprobs._PER_CORE", logits)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
        options: dict[str, Any] = {"softcap": softcap, "truncation": truncation, "chunk_size": 16, "with_entropy": True}
        logprobs, entropy = chunked_logprobs(hidden, weight, labels, bias=bias, **options)
        assert entropy is not None
        grads = torch.autograd.grad((logprobs * entropy).sum(), (hidden, weight, bias))
        results.append((logprobs, entropy, *grads))
    for found in results[:2]:
        for one, other in zip(found, results[2], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("chunk_size", [T, 16, 10])
def test_a_chunk_has_four_products_and_the_last_one_three(chunk_size: int) -> None:
    hidden, weight, _, labels = head()
    chunks = -(-T // chunk_size)
    with Products() as products:
        logprobs, _ = chunked_logprobs(hidden, weight, labels, chunk_size=chunk_size)
        first = torch.autograd.grad(logprobs.sum(), (hidden, weight), retain_graph=True)
    assert products.count == 4 * chunks - 1
    with Products() as products:
        again = torch.autograd.grad(logprobs.sum(), (hidden, weight))
    assert products.count == 3 * chunks, "what was kept is used up"
    for one, other in zip(first, again, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gives_float32_that_is_as_near_as_its_logits_allow(dtype: torch.dtype) -> None:
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


def test_a_frozen_head_gets_no_gradient_and_the_hidden_states_the_same_one() -> None:
    hidden, weight, _, labels = head()
    alone = torch.autograd.grad(chunked_logprobs(hidden, weight.detach(), labels)[0].sum(), hidden)[0]
    both = torch.autograd.grad(chunked_logprobs(hidden, weight, labels)[0].sum(), (hidden, weight))[0]
    torch.testing.assert_close(alone, both, rtol=0, atol=0)


def test_logits_of_any_size_stay_finite() -> None:
    hidden, weight, _, labels = head()
    logprobs, entropy = chunked_logprobs(hidden * 1e4, weight, labels, with_entropy=True)
    assert entropy is not None
    gradient = torch.autograd.grad(logprobs.sum() + entropy.sum(), weight)[0]
    assert torch.isfinite(logprobs).all()
    assert torch.isfinite(entropy).all()
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("truncation", [Truncation(top_p=0.2), Truncation(top_k=1), Truncation(min_p=1.0)])
def test_a_label_that_truncation_would_exclude_has_a_finite_logprob_and_gradient(truncation: Truncation) -> None:
    """Rounding or an optimizer step can put a sampled token outside: here every label is the least likely one."""
    hidden, weight, _, _ = head()
    labels = (hidden @ weight.T).argmin(-1)
    logprobs, entropy = chunked_logprobs(hidden, weight, labels, truncation=truncation, with_entropy=True)
    assert entropy is not None
    for found, full in zip(
        (logprobs, entropy), chunked_logprobs(hidden, weight, labels, with_entropy=True), strict=True
    ):
        assert torch.equal(found, full)  # nothing is less likely, so nothing is left out
    gradient = torch.autograd.grad(logprobs.sum() + entropy.sum(), weight)[0]
    assert gradient.isfinite().all()


def test_truncated_logprobs_sum_to_one_over_what_is_left() -> None:
    hidden, weight, _, _ = head(dtype=torch.float64)
    for truncation in (Truncation(top_p=0.7), Truncation(top_k=5), Truncation(min_p=0.1)):
        for row in hidden[:5]:
            left = sorted(head_of((row @ weight.T).tolist(), truncation))
            logprobs, _ = chunked_logprobs(row.expand(len(left), -1), weight, torch.tensor(left), truncation=truncation)
            assert logprobs.exp().sum().item() == pytest.approx(1.0, rel=1e-12)
            assert len(left) < V


def test_truncated_logits_of_any_size_stay_finite() -> None:
    hidden, weight, _, labels = head()
    truncation = Truncation(top_p=0.9, top_k=20, min_p=1e-3)
    logprobs, entropy = chunked_logprobs(hidden * 1e4, weight, labels, truncation=truncation, with_entropy=True)
    assert entropy is not None
    gradient = torch.autograd.grad(logprobs.sum() * 1e5 + entropy.sum() * 1e5, weight)[0]
    assert all(x.isfinite().all() for x in (logprobs, entropy, gradient))
