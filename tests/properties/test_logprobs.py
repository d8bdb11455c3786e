"""Chunked logprobs equal a full log-softmax in value and gradient, for every kind of head, also truncated."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fsdptrain.model.logprobs import chunked_logprobs
from fsdptrain.types import UNTRUNCATED, Truncation
from tests.unit.model.test_truncation import head_of

HEADS = st.fixed_dictionaries(
    {
        "softcap": st.sampled_from([None, 2.0, 30.0]),
        "temperature": st.sampled_from([0.5, 1.0, 1.7]),
        "logit_scale": st.sampled_from([0.0625, 1.0, 3.0]),
        "truncation": st.sampled_from(
            [UNTRUNCATED, Truncation(top_p=0.6), Truncation(top_k=2), Truncation(min_p=0.4), Truncation(0.8, 4, 0.1)]
        ),
    }
)
SIZES = st.tuples(st.integers(1, 12), st.integers(1, 4), st.integers(2, 9))  # tokens, width, vocabulary


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
    """Logprob and entropy over the tokens that truncation keeps, and those as likely as the label."""
    floor = min(z[list(head_of(z.tolist(), truncation))].min().item(), z[label].item())
    head = [i for i in range(len(z)) if z[i].item() >= floor]
    logp = z[head].log_softmax(-1)
    return logp[head.index(int(label))], -(logp.exp() * logp).sum()


@given(
    sizes=SIZES, head=HEADS, has_bias=st.booleans(), chunk_size=st.integers(1, 13),
    cached_rows=st.sampled_from([0, 3, 1000]), seed=st.integers(0, 99),
)  # fmt: skip
def test_values_and_gradients_are_those_of_a_full_log_softmax(sizes, head, has_bias, chunk_size, cached_rows, seed):
    (num_tokens, width, vocab), generator = sizes, torch.Generator().manual_seed(seed)
    labels = torch.randint(vocab, (num_tokens,), generator=generator)
    shapes = [(num_tokens, width), (vocab, width)] + [(vocab,)] * has_bias
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    options = {**head, "bias": inputs[2] if has_bias else None}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fsdptrain.model.logit_passes._PER_CORE", max(1, cached_rows * vocab))
        patch.setattr(torch, "get_num_threads", lambda: 1)
        found = chunked_logprobs(inputs[0], inputs[1], labels, chunk_size=chunk_size, with_entropy=True, **options)
        upstream = [torch.randn(num_tokens, generator=generator, dtype=torch.float64) for _ in range(2)]
        gradients = torch.autograd.grad(found, inputs, upstream)
    wanted = full_logprobs(inputs[0], inputs[1], labels, **options)
    for one, other in zip((*found, *gradients), (*wanted, *torch.autograd.grad(wanted, inputs, upstream)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
