"""The sections of the configuration that say how rewards become gradients. See fsdptrain/config/sections.py."""

from typing import Literal

from pydantic import Field

from fsdptrain.config.section import Section


class AlgorithmConfig(Section):
    """From rewards to a loss."""

    algorithm: Literal[
        "grpo", "dapo", "dr_grpo", "gspo", "cispo", "sapo", "gmpo", "dppo_tv", "dppo_kl", "ipo", "reinforce", "rloo",
        "reinforce++_baseline", "max_rl", "opo", "sft",
    ] = "grpo"  # fmt: skip
    """A preset of loss, aggregation, advantage and other options; what is said of these wins over it. `sft`:
    supervised training on prompts and their labels; all others: reinforcement learning. See docs/algorithms.md."""
    loss: str = "grpo"
    """grpo, gspo, gmpo, cispo, sapo, dppo_tv, dppo_kl, ipo, reinforce, sft, or `package.module:function`. Default: as
    the algorithm says."""
    n_samples_per_prompt: int = Field(default=8, ge=1)
    """Completions for each prompt: the size of a group."""
    advantage_estimator: Literal["grpo", "dr_grpo", "rloo", "reinforce++_baseline", "max_rl", "opo"] = "grpo"
    """`grpo`: (reward - mean) / std within the group. `dr_grpo`: reward - mean. `rloo`: reward - mean of the others.
    `reinforce++_baseline`: reward - mean, whitened over the batch. `max_rl`: (reward - mean) / mean. `opo`: reward -
    mean weighted by length."""
    eps_clip: float = Field(default=0.2, gt=0.0, lt=1.0)
    """Lower clip of the policy ratio: 1 - eps_clip. gmpo: of its logarithm. dppo_tv, dppo_kl, ipo: how far a token may
    fall, in probability or KL."""
    eps_clip_high: float | None = Field(default=None, gt=0.0)
    """Upper clip of the policy ratio: 1 + eps_clip_high; gmpo, dppo_tv, dppo_kl, ipo as above. Default: eps_clip."""
    eps_clip_c: float | None = Field(default=None, gt=1.0)
    """Dual clip: bound of the loss where the advantage is negative, usually 3. Default: off."""
    is_cap_high: float = Field(default=5.0, ge=1.0)
    """cispo, dppo_tv, dppo_kl: largest importance weight. Absolute, not 1 + eps."""
    sapo_tau_pos: float = Field(default=1.0, gt=0.0)
    """sapo: steepness of the gate where the advantage is positive."""
    sapo_tau_neg: float = Field(default=1.05, gt=0.0)
    """sapo: steepness of the gate elsewhere."""
    ipo_kl_coef: float = Field(default=1e-3, ge=0.0)
    """ipo: coefficient of the squared log ratio of policy to engine."""
    use_opsm: bool = False
    """Drop sequences of negative advantage that have moved away from the old policy (off-policy sequence masking)."""
    opsm_delta: float = Field(default=1e-4, ge=0.0)
    """How far is away: mean of old minus new logprob over the tokens of a sequence. [nats]"""
    loss_aggregation: Literal["token_mean", "sequence_mean", "fixed_length", "sequence_sum"] = "token_mean"
    """How tokens are weighted, over the whole optimizer step and all ranks."""
    kl_loss_coef: float = Field(default=0.0, ge=0.0)
    """Coefficient of the KL divergence to the reference model. 0: no reference model is built."""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "k3"
    """Estimator of the KL divergence. `low_var_kl`: k3 within bounds."""
    use_unbiased_kl: bool = False
    """Multiply the KL by the policy ratio, with its gradient: unbiased off-policy, and in its gradient."""
    entropy_coef: float = Field(default=0.0, ge=0.0)
    """Coefficient of the entropy bonus."""
    use_rollout_logprobs: bool = False
    """Take the engine's logprobs as the old ones, in place of scoring them again with the trainer."""
    mismatch_correction: Literal["none", "tis", "tis_sequence", "mis", "mis_sequence", "icepop"] = "none"
    """Weight the loss by the ratio of trainer to engine; out of bounds truncated (tis) or dropped (mis, icepop)."""
    mismatch_low: float | None = Field(default=None, ge=0.0, le=1.0)
    """Lower bound of that ratio. Default: tis 0, mis and icepop 0.5, mis_sequence 0.99."""
    mismatch_high: float | None = Field(default=None, ge=1.0)
    """Upper bound of that ratio. Default: tis and mis 2, icepop 5, mis_sequence 1.01."""
