"""Divergences by their definitions: whole logits in float64, where autograd computes the gradients."""

import pytest
import torch
from torch import Tensor

from fsdptrain.config import Config
from fsdptrain.features import FEATURES
from fsdptrain.features.distillation.divergence import Head, TopTokens, chunked_divergence, top_tokens, with_rest
from fsdptrain.model.logit_passes import HeadTransform

M, V, D, TEACHER_D = 11, 23, 6, 9
BETAS = (0.0, 0.3, 1.0)
TRANSFORMS = (HeadTransform(temperature=0.7), HeadTransform(logit_scale=0.5, softcap=2.0, temperature=1.3))


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def z_of(hidden: Tensor, head: Head) -> Tensor:
    logits, transform = hidden @ head.weight.T + (0 if head.bias is None else head.bias), head.transform
    logits = logits * transform.logit_scale
    if transform.softcap is not None:
        logits = transform.softcap * (logits / transform.softcap).tanh()
    return logits / transform.temperature


def defined(p: Tensor, q: Tensor, beta: float) -> Tensor:
    """The divergence of the policy q to the teacher p, both probabilities [M, V], by the paper's definition."""

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a * (a / b).log()).sum(1)

    if beta in (0, 1):
        return kl(q, p) if beta else kl(p, q)
    mixture = beta * p + (1 - beta) * q
    return beta * kl(p, mixture) + (1 - beta) * kl(q, mixture)


TEACHER = random(M, TEACHER_D, seed=1), Head(random(V, TEACHER_D, seed=2), random(V, seed=3), TRANSFORMS[0])


def top(k: int, beta: float) -> TopTokens:
    return TopTokens(*top_tokens(*TEACHER, k, vocab_size=V, chunk_size=3), beta)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("chunk_size", [4, 64])
def test_divergence_and_gradients_of_all_tokens_are_those_of_the_definition(
    beta: float, transform: HeadTransform, chunk_size: int
) -> None:
    p = z_of(*TEACHER).softmax(-1)
    grad = random(M, seed=4)

    def leaves() -> list[Tensor]:
        return [x.requires_grad_() for x in (random(M, D, seed=5), random(V, D, seed=6), random(V, seed=7))]

    hidden, weight, bias = wanted = leaves()
    values = defined(p, z_of(hidden, Head(weight, bias, transform)).softmax(-1), beta)
    values.backward(grad)
    hidden, weight, bias = found = leaves()
    ours = chunked_divergence(hidden, Head(weight, bias, transform), top(V - 1, beta), chunk_size=chunk_size)
    ours.backward(grad)
    torch.testing.assert_close(ours, values, rtol=1e-10, atol=1e-12)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("beta", BETAS)
def test_fewer_tokens_bound_the_divergence_from_below(beta: float) -> None:
    hidden, head = random(M, D, seed=5), Head(random(V, D, seed=6), None, TRANSFORMS[0])
    found = [chunked_divergence(hidden, head, top(k, beta), chunk_size=4) for k in (1, 5, V - 1)]
    assert (found[0] <= found[1] + 1e-12).all()
    assert (found[1] <= found[2] + 1e-12).all()


def test_top_tokens_are_tokens_of_the_policy() -> None:
    """The last 4 rows of the teacher's head are padding, and here the most likely tokens."""
    weight = random(V + 4, TEACHER_D, seed=2)
    bias = torch.zeros(V + 4, dtype=torch.float64).index_fill(0, torch.arange(V, V + 4), 50.0)
    hidden = random(M, TEACHER_D, seed=1)
    ids, logprobs = top_tokens(hidden, Head(weight, bias, TRANSFORMS[0]), 5, vocab_size=V, chunk_size=4)
    assert ids.max() < V
    torch.testing.assert_close(logprobs.exp().sum(1), torch.ones(M, dtype=torch.float64))


def test_the_rest_is_what_the_chosen_tokens_leave() -> None:
    logits = random(M, V, seed=8)
    ids = logits.topk(3).indices
    probabilities = with_rest(logits, ids).exp()
    torch.testing.assert_close(probabilities.sum(1), torch.ones(M, dtype=torch.float64))
    torch.testing.assert_close(probabilities[:, :3], logits.softmax(-1).gather(1, ids))


@pytest.mark.parametrize("num_rollout", [0, 1])
def test_a_run_that_only_evaluates_has_no_teacher(num_rollout: int) -> None:
    config = Config(hf_checkpoint="x", algorithm="opd", opd_teacher="y", num_rollout=num_rollout)
    assert [entry.target.partition(":")[0] for entry in FEATURES if entry.enabled(config)] == [
        "distillation"
    ] * num_rollout
