"""Estimators of the KL divergence."""

import torch

from fsdptrain.algo.kl import KL_ESTIMATORS


def distributions() -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs of a policy and a reference over 50 tokens, f64."""
    generator = torch.Generator().manual_seed(0)
    policy, reference = torch.randn(2, 50, generator=generator, dtype=torch.float64).log_softmax(-1)
    return policy, reference


def test_k1_and_k3_have_the_kl_as_their_expectation() -> None:
    policy, reference = distributions()
    true = (policy.exp() * (policy - reference)).sum()
    for name in ("k1", "k3"):
        torch.testing.assert_close((policy.exp() * KL_ESTIMATORS[name](policy - reference)).sum(), true)


def test_low_var_kl_has_no_gradient_beyond_its_bounds() -> None:
    """Not NaN either, where exp overflows."""
    log_ratio = torch.tensor([-1e4, -200.0, 200.0, 1e4], dtype=torch.float64, requires_grad=True)
    KL_ESTIMATORS["low_var_kl"](log_ratio).sum().backward()
    assert log_ratio.grad is not None
    assert log_ratio.grad.eq(0).all()


def test_k3_keeps_its_digits_near_zero() -> None:
    """exp(x) - 1 - x cancels in float32 where x is small; expm1 does not."""
    log_ratio = torch.tensor([1e-3, -1e-3])
    expected = torch.expm1(-log_ratio.double()) + log_ratio.double()
    torch.testing.assert_close(KL_ESTIMATORS["k3"](log_ratio).double(), expected, rtol=5e-4, atol=0)
