"""Draws have the probabilities of the logits and depend only on the name of the completion."""

import numpy as np
import pytest
import torch

from fsdptrain.rollout.sampling import inverse_cdf, restrict, sample, uniform_stream
from fsdptrain.types import Truncation


def grid(count: int) -> torch.Tensor:
    """Evenly spaced numbers in [0, 1): draws with them have exactly the shares of the distribution."""
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


def test_stream_depends_on_every_part_of_its_name_and_only_grows():
    stream = uniform_stream(3, "prompt", 1, 100)
    assert np.array_equal(stream[:40], uniform_stream(3, "prompt", 1, 40))
    for other in [(4, "prompt", 1), (3, "other", 1), (3, "prompt", 2)]:
        assert not np.isclose(stream, uniform_stream(*other, 100)).any()


@pytest.mark.parametrize("vocab_size", [2, 127, 128, 129, 1000, 20_000])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_shares_of_tokens_are_their_probabilities(vocab_size, temperature):
    count = 2000
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 2
    expected = (logits.double() / temperature).softmax(-1)
    tokens = [sample(logits.expand(len(part), -1), part, temperature=temperature)[0] for part in grid(count).split(500)]
    shares = torch.bincount(torch.cat(tokens), minlength=vocab_size) / count
    # each interval holds the grid's points but for one at either end
    torch.testing.assert_close(shares.double(), expected, rtol=1e-5, atol=1.01 / count)


def test_draws_are_those_of_the_plain_inverse():
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(64, 5000, generator=generator).pow(8)
    uniforms = torch.rand(64, dtype=torch.float64, generator=generator)
    sums = weights.double().cumsum(-1)
    expected = torch.searchsorted(sums, uniforms[:, None] * sums[:, -1:], right=True).squeeze(-1)
    assert torch.equal(inverse_cdf(weights, uniforms), expected)


@pytest.mark.parametrize("uniform", [0.0, 0.3, 1.0 - 2.0**-53])
@pytest.mark.parametrize("vocab_size", [5, 300, 70_000])
def test_token_of_probability_zero_is_never_drawn(uniform, vocab_size):
    allowed = [vocab_size // 3, vocab_size // 2]
    logits = torch.full((1, vocab_size), -torch.inf)
    logits[0, allowed] = torch.tensor([0.1, 2.0])
    tokens, _ = sample(logits, torch.tensor([uniform], dtype=torch.float64), temperature=1.0)
    assert tokens.item() in allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 3.0])
def test_logprob_is_that_of_the_tempered_softmax_in_float32(temperature, dtype):
    logits = (torch.randn(50, 400, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    tokens, logprobs = sample(logits, grid(50), temperature=temperature)
    assert logprobs.dtype == torch.float32
    exact, plain = ((x / temperature).log_softmax(-1).double() for x in (logits.double(), logits.float()))
    error = (logprobs.double() - exact.gather(-1, tokens[:, None]).squeeze(-1)).abs().max()
    assert error <= 4 * (plain - exact).abs().max()


def test_temperature_zero_takes_the_most_likely_token_and_its_untempered_logprob():
    logits = torch.randn(20, 400, generator=torch.Generator().manual_seed(1))
    tokens, logprobs = sample(logits, grid(20), temperature=0.0)
    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).amax(-1))


@pytest.mark.parametrize("truncation", [Truncation(top_k=3), Truncation(top_p=0.7), Truncation(min_p=0.3)])
def test_truncated_draws_are_those_of_the_renormalized_head(truncation):
    logits = torch.tensor([[0.05, 0.4, 0.25, 0.1, 0.2]]).log()
    kept = restrict(logits, truncation).softmax(-1).double()[0]
    assert kept.tolist() == pytest.approx([0.0, 0.4 / 0.85, 0.25 / 0.85, 0.0, 0.2 / 0.85], rel=1e-6)
    tokens, logprobs = sample(logits.expand(1000, -1), grid(1000), temperature=1.0, truncation=truncation)
    shares = torch.bincount(tokens, minlength=5) / 1000
    torch.testing.assert_close(shares.double(), kept, rtol=0, atol=1.01e-3)
    torch.testing.assert_close(logprobs.double(), kept[tokens].log(), rtol=0, atol=1e-6)
