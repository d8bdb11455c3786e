"""The losses once more, sequence by sequence from their papers, in float64, with autograd through the formula.

Nothing of fsdptrain.algo is used. A sequence is a mapping of float64 vectors over its T loss tokens: l (with gradient),
lo, lr; and its advantage A. A loss gives the T losses of its tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdptrain.algo.weighted_losses import PRIME_RL_KL_COEF
from fsdptrain.types import LossConfig


@dataclass(frozen=True)
class Sequence:
    l: Tensor  # noqa: E741 - the notation of the papers' logarithm
    lo: Tensor
    lr: Tensor
    lf: Tensor
    w: Tensor  # weights
    h: Tensor  # entropy
    A: float


def bound(x: Tensor) -> Tensor:
    """House rule: log ratios lie in [-20, 20]."""
    return torch.clip(x, -20.0, 20.0)


def grpo(s: Sequence, c: LossConfig) -> Tensor:
    return ppo(bound(s.l - s.lo).exp(), s.A, c)


def gspo(s: Sequence, c: LossConfig) -> Tensor:
    """The sequence form: one ratio, (pi / pi_old)^(1 / |y|), with the gradient through all of it."""
    log_ratio = s.l.sum() - s.lo.sum()
    return ppo(bound(log_ratio / len(s.l)).exp(), s.A, c) * torch.ones_like(s.l)


def upper_clip(c: LossConfig) -> float:
    return c.eps_clip if c.eps_clip_high is None else c.eps_clip_high


def ppo(r: Tensor, a: float, c: LossConfig) -> Tensor:
    surrogate = torch.min(r * a, torch.clip(r, 1 - c.eps_clip, 1 + upper_clip(c)) * a)
    if a < 0 and c.eps_clip_c is not None:
        surrogate = torch.max(surrogate, torch.full_like(r, c.eps_clip_c * a))
    return -surrogate


def cispo(s: Sequence, c: LossConfig) -> Tensor:
    weights = [min(x, c.is_cap_high) for x in bound(s.l - s.lo).exp().tolist()]
    return -torch.tensor(weights, dtype=torch.float64) * s.A * s.l


def sapo(s: Sequence, c: LossConfig) -> Tensor:
    tau = c.sapo_tau_pos if s.A > 0 else c.sapo_tau_neg
    r = bound(s.l - s.lo).exp()
    return -s.A * (4 / tau) / (1 + torch.exp(-tau * (r - 1)))


def prime_rl(s: Sequence, c: LossConfig) -> Tensor:
    losses = []
    for t in range(len(s.l)):
        moved = s.l[t].detach().exp().item() - s.lr[t].exp().item()
        dropped = moved > upper_clip(c) if s.A > 0 else moved < -c.eps_clip
        rho = bound(s.l[t] - s.lr[t])
        losses.append((0.0 if dropped else -s.A) * rho.exp() + PRIME_RL_KL_COEF * rho**2)
    return torch.stack(losses)


def reinforce(s: Sequence, _c: LossConfig) -> Tensor:
    return -s.A * s.l


def sft(s: Sequence, _c: LossConfig) -> Tensor:
    return -s.l


POLICY: Mapping[str, Callable[[Sequence, LossConfig], Tensor]] = {
    "grpo": grpo, "gspo": gspo, "cispo": cispo, "sapo": sapo, "prime_rl": prime_rl, "reinforce": reinforce, "sft": sft,
}  # fmt: skip
UNCORRECTED = ("prime_rl", "sft")
OF_SEQUENCES = ("gspo",)


BOUNDS = {"none": (0, 0), "tis": (0, 2), "tis_sequence": (0, 2), "mis": (0.5, 2), "mis_sequence": (0.99, 1.01),
          "icepop": (0.5, 5)}  # fmt: skip


def log_ratios(s: Sequence, c: LossConfig) -> list[float]:
    """Trainer to engine; without logprobs of the old policy the present one is the trainer."""
    return ((s.l.detach() if c.use_rollout_logprobs else s.lo) - s.lr).tolist()


def mismatch_weights(s: Sequence, c: LossConfig) -> list[float]:
    low, high = BOUNDS[c.mismatch_correction]
    low = low if c.mismatch_low is None else c.mismatch_low
    high = high if c.mismatch_high is None else c.mismatch_high
    logs = log_ratios(s, c)
    n, kind = len(logs), c.mismatch_correction
    if kind == "tis_sequence":
        logs = [sum(logs)] * n
    if kind == "mis_sequence":
        logs = [sum(logs) / n] * n
    ratios = torch.tensor([min(max(x, -20.0), 20.0) for x in logs], dtype=torch.float64).exp().tolist()
    if kind == "none":
        return [1.0] * n
    if kind in ("tis", "tis_sequence"):
        return [min(max(w, low), high) for w in ratios]
    return [w if low <= w <= high else 0.0 for w in ratios]


def kl(s: Sequence, c: LossConfig) -> Tensor:
    d = s.l - s.lf
    clipped = torch.clip(d, -20, 20)
    values = {
        "k1": d,
        "k2": d * d / 2,
        "k3": torch.expm1(-d) + d,
        "low_var_kl": torch.clip(torch.expm1(-clipped) + clipped, -10, 10),
    }[c.kl_loss_type]
    return values * bound(s.l - s.lo).exp() if c.use_unbiased_kl else values


def by_token(policy: Tensor, l: Tensor) -> Tensor:  # noqa: E741
    """The same values, with d sum(policy) / d l[t] at t alone: so that a token's correction weights its own part."""
    (gradient,) = torch.autograd.grad(policy.sum(), l, retain_graph=True)
    return policy.detach() + gradient * (l - l.detach())


def loss_of(name: str, sequences: list[Sequence], c: LossConfig) -> Tensor:
    """Sum over sequences and tokens of w (W L + beta KL - alpha H)."""
    total = torch.zeros((), dtype=torch.float64)
    for s in sequences:
        policy = POLICY[name](s, c)
        if name in OF_SEQUENCES and policy.requires_grad:
            policy = by_token(policy, s.l)
        if name not in UNCORRECTED:
            policy = policy * torch.tensor(mismatch_weights(s, c), dtype=torch.float64)
            if c.use_opsm and s.A < 0 and (s.lo.sum() - s.l.detach().sum()).item() / len(s.l) > c.opsm_delta:
                policy = 0.0 * s.l
        total = total + (s.w * policy).sum()
        if c.kl_loss_coef:
            total = total + (s.w * c.kl_loss_coef * kl(s, c)).sum()
        total = total - (s.w * c.entropy_coef * s.h).sum()
    return total
