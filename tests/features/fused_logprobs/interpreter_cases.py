"""The Triton kernels, in Triton's interpreter, equal torch's operations in value and gradient.

test_kernels.py runs this file in a process with TRITON_INTERPRET=1, which Triton reads when it is first imported.
"""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fsdptrain.errors import ConfigError
from fsdptrain.features.fused_logprobs.feature import compare
from fsdptrain.features.fused_logprobs.kernels import TritonPasses
from fsdptrain.model.logit_passes import HeadTransform, LogitRows, RowGrads, grad_raw
from fsdptrain.model.logprobs import chunked_logprobs
from fsdptrain.model.truncation import UNTRUNCATED, Truncation
from tests.properties.test_logprobs import HEADS


def results(
    inputs: list[Tensor], labels: Tensor, upstream: list[Tensor], *, with_entropy: bool, **options: Any
) -> list[Tensor]:
    """Logprobs, entropy if wanted, and the gradients of `inputs`: hidden, weight and maybe bias."""
    bias = inputs[2] if len(inputs) > 2 else None
    found = chunked_logprobs(inputs[0], inputs[1], labels, bias=bias, with_entropy=with_entropy, **options)
    values = [x for x in found if x is not None]
    return [*values, *torch.autograd.grad(values, inputs, upstream[: len(values)])]


def inputs_of(
    sizes: tuple[int, int, int], *, has_bias: bool, dtype: torch.dtype, seed: int, scale: float = 1.0
) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    (tokens, width, vocab), generator = sizes, torch.Generator().manual_seed(seed)
    shapes = [(tokens, width), (vocab, width)] + [(vocab,)] * has_bias
    made = [(torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype) for shape in shapes]
    labels = torch.randint(vocab, (tokens,), generator=generator)
    exact = torch.promote_types(dtype, torch.float32)
    upstream = [torch.randn(tokens, generator=generator, dtype=exact) for _ in range(2)]
    return [x.requires_grad_() for x in made], labels, upstream


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 4), st.sampled_from([2, 7, 64, 4097])),
    head=HEADS,
    has_bias=st.booleans(),
    with_entropy=st.booleans(),
    chunk_size=st.integers(1, 7),
    seed=st.integers(0, 99),
)
def test_values_and_gradients_are_those_of_torch(sizes, head, has_bias, with_entropy, chunk_size, seed):
    inputs, labels, upstream = inputs_of(sizes, has_bias=has_bias, dtype=torch.float64, seed=seed)
    options = {**head, "chunk_size": chunk_size, "with_entropy": with_entropy}
    found = results(inputs, labels, upstream, passes=TritonPasses(), **options)
    wanted = results(inputs, labels, upstream, **options)
    raw = inputs[0] @ inputs[1].T + (inputs[2] if has_bias else 0)
    logits = raw * head["logit_scale"] / head["temperature"]
    logsumexp = logits.abs().max() + math.log(sizes[2])  # at most: a small logprob is a difference of large numbers
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).abs().max() <= 1e-14 * (1 + other.abs().max() + logsumexp) * len(labels)


@pytest.mark.parametrize(
    ("vocab", "softcap", "truncation"),
    [(151_936, None, UNTRUNCATED), (20_003, 30.0, UNTRUNCATED), (20_003, 30.0, Truncation(top_p=0.9, top_k=200))],
)
def test_float32_is_nearly_as_near_to_float64_as_torch(
    vocab: int, softcap: float | None, truncation: Truncation
) -> None:
    inputs, labels, upstream = inputs_of((2, 32, vocab), has_bias=True, dtype=torch.float32, seed=0)
    options: dict[str, Any] = {"softcap": softcap, "temperature": 0.7, "truncation": truncation, "with_entropy": True}
    found = results(inputs, labels, upstream, passes=TritonPasses(), **options)
    torchs = results(inputs, labels, upstream, **options)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    exact = results(wide, labels, [x.double() for x in upstream], **options)
    if softcap is None:
        for kernel, torch_ in zip(found, torchs, strict=True):
            assert (kernel - torch_).abs().max() <= 1e-6 * torch_.abs().max().clamp(min=1.0)
    for part in (slice(2), slice(2, None)):  # values, gradients
        of_kernels, of_torch = (
            max((x - true).abs().max().item() for x, true in zip(some[part], exact[part], strict=True))
            for some in (found, torchs)
        )
        rounding = 8 * torch.finfo(torch.float32).eps * max(true.abs().max().item() for true in exact[part])
        assert of_kernels <= 4 * of_torch + rounding, "tanh rounds more often"


def test_bfloat16_is_within_the_rounding_of_the_written_gradient() -> None:
    """The gradient of a logit is rounded once. The interpreter truncates, a device rounds to nearest."""
    inputs, labels, upstream = inputs_of((5, 16, 300), has_bias=False, dtype=torch.bfloat16, seed=1)
    hidden, weight = (x.detach() for x in inputs)
    passes, transform = TritonPasses(), HeadTransform(temperature=0.7, softcap=5.0)
    raw = hidden @ weight.T
    rows, logprobs = LogitRows(labels, torch.empty(5), torch.empty(5), floor=None), torch.empty(5)
    passes.forward(raw, rows, transform, logprobs)
    wanted, wanted_entropy = chunked_logprobs(
        hidden, weight, labels, softcap=5.0, temperature=0.7, chunk_size=5, with_entropy=True
    )
    assert wanted_entropy is not None
    torch.testing.assert_close(logprobs, wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(rows.entropy, wanted_entropy, rtol=1e-6, atol=1e-6)
    exact = grad_raw(raw, rows, transform, RowGrads(*upstream))
    passes.backward(raw, rows, transform, RowGrads(*upstream), None)
    eps = torch.finfo(torch.bfloat16).eps  # the largest relative error of truncation
    assert ((raw.float() - exact).abs() <= 1.01 * eps * exact.abs() + 1e-7).all()  # 0.01: float32 before that


def test_no_gradient_of_either_result_is_a_gradient_of_zero() -> None:
    raw, zeros = torch.randn(3, 9), torch.zeros(3)
    rows = LogitRows(zeros.long(), zeros, zeros, floor=None)
    TritonPasses().backward(raw, rows, HeadTransform(), RowGrads(None, None), None)
    assert (raw == 0).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("vocab", [9, 4096, 5000])
def test_a_row_without_any_finite_logit_is_not_hidden(vocab: int) -> None:
    raw = torch.full((1, vocab), -torch.inf)
    rows, logprobs = LogitRows(torch.zeros(1).long(), torch.zeros(1), entropy=None, floor=None), torch.zeros(1)
    TritonPasses().forward(raw, rows, HeadTransform(), logprobs)
    assert logprobs.isnan().all()


class WrongValues(TritonPasses):
    def forward(self, raw: Tensor, rows: LogitRows, transform: HeadTransform, logprobs: Tensor) -> None:
        super().forward(raw, rows, transform, logprobs)
        logprobs.add_(0.01)


class WrongEntropy(TritonPasses):
    def forward(self, raw: Tensor, rows: LogitRows, transform: HeadTransform, logprobs: Tensor) -> None:
        super().forward(raw, rows, transform, logprobs)
        if rows.entropy is not None:
            rows.entropy.add_(0.001)


class WrongGradient(TritonPasses):
    def backward(self, raw: Tensor, *arguments: Any) -> None:
        super().backward(raw, *arguments)
        raw.mul_(1.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_comparison_at_start_accepts_the_kernels_and_finds_wrong_ones(dtype: torch.dtype) -> None:
    compare(TritonPasses(), torch.device("cpu"), dtype)
    for wrong in (WrongValues, WrongEntropy, WrongGradient):
        with pytest.raises(ConfigError, match="its results differ from torch's by"):
            compare(wrong(), torch.device("cpu"), dtype)
