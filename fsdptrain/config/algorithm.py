"""Configuration sections for the path from rewards to gradients. See fsdptrain/config/sections.py."""

from typing import Literal

from pydantic import Field

from fsdptrain.config.section import Section


class AlgorithmConfig(Section):
    """Computation of the loss from rewards."""

    algorithm: Literal[
        "grpo", "dapo", "dr_grpo", "gspo", "cispo", "sapo", "gmpo", "dppo_tv", "dppo_kl", "ipo", "reinforce", "rloo",
        "reinforce++_baseline", "max_rl", "opo", "sft",
    ] = "grpo"  # fmt: skip
    """Preset of loss, aggregation, advantage and other options; explicit values of these override it. `sft`: supervised
    training on prompts and labels; all others: reinforcement learning. See docs/algorithms.md."""
    loss: str = "grpo"
    """grpo, gspo, gmpo, cispo, sapo, dppo_tv, dppo_kl, ipo, reinforce, sft, or `package.module:function`. Default: the
    loss of the algorithm."""
    n_samples_per_prompt: int = Field(default=8, ge=1)
    """Completions per prompt: the group size."""
    advantage_estimator: str = "grpo"
    """`grpo`: (reward - mean) / std within the group. `dr_grpo`: reward - mean. `rloo`: reward - mean of the others.
    `reinforce++_baseline`: reward - mean, whitened over the batch. `max_rl`: (reward - mean) / mean. `opo`: reward -
    length-weighted mean. Or `package.module:function`: (rewards, lengths) of a group -> advantages."""
    advantage_scale: Literal["auto", "group", "batch", "whiten", "none"] = "auto"
    """Divide advantages by the std of rewards in the group (`group`) or of all ranks (`batch`), or whiten them over the
    tokens of the batch (`whiten`). `auto`: the scale of the estimator, group for grpo."""
    multi_reward: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """How to combine several rewards: advantages of their weighted sum, or (GDPO) each reward normalized within its
    group, then summed by weight, then whitened over the batch."""
    eps_clip: float = Field(default=0.2, gt=0.0, lt=1.0)
    """Lower clip of the policy ratio: 1 - eps_clip. gmpo: of the log ratio. dppo_tv, dppo_kl, ipo: largest decrease of
    a token, in probability or KL."""
    eps_clip_high: float | None = Field(default=None, gt=0.0)
    """Upper clip of the policy ratio: 1 + eps_clip_high; gmpo, dppo_tv, dppo_kl, ipo as for eps_clip. Default:
    eps_clip."""
    eps_clip_c: float | None = Field(default=None, gt=1.0)
    """Dual clip: bound of the loss for negative advantages, usually 3. Default: off."""
    is_cap_high: float = Field(default=5.0, ge=1.0)
    """cispo, dppo_tv, dppo_kl: cap of the importance weight. Absolute, not 1 + eps."""
    sapo_tau_pos: float = Field(default=1.0, gt=0.0)
    """sapo: steepness of the gate for positive advantages."""
    sapo_tau_neg: float = Field(default=1.05, gt=0.0)
    """sapo: steepness of the gate for other advantages."""
    ipo_kl_coef: float = Field(default=1e-3, ge=0.0)
    """ipo: coefficient of the squared log ratio of policy to engine."""
    use_opsm: bool = False
    """Drop sequences with negative advantage that have moved away from the old policy (off-policy sequence masking)."""
    opsm_delta: float = Field(default=1e-4, ge=0.0)
    """Threshold of --use-opsm: mean of old minus new logprob over the tokens of a sequence. [nats]"""
    loss_aggregation: Literal["token_mean", "sequence_mean", "fixed_length", "sequence_sum"] = "token_mean"
    """Weighting of tokens over the whole optimizer step and all ranks."""
    kl_loss_coef: float = Field(default=0.0, ge=0.0)
    """Coefficient of the KL divergence to the reference model in the loss. 0 here and in --kl-reward-coef: no reference
    model."""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "k3"
    """Estimator of the KL divergence. `low_var_kl`: clamped k3."""
    use_unbiased_kl: bool = False
    """Multiply the KL by the policy ratio, with its gradient: unbiased off-policy, also in the gradient."""
    kl_reward_coef: float = Field(default=0.0, ge=0.0)
    """Coefficient of the KL divergence of old policy to reference, summed over a response and subtracted from its
    reward."""
    kl_reward_type: Literal["k1", "k2", "k3", "low_var_kl"] = "k1"
    """Estimator of the KL divergence in the reward, which needs no gradient: k1 is unbiased."""
    kl_target: float | None = Field(default=None, gt=0.0)
    """Adapt the KL coefficient after each rollout to reach this KL divergence. Default: off. [nats per token]"""
    kl_horizon: int = Field(default=10_000, ge=1)
    """Samples in which the adaptive coefficient changes by at most a fifth. [samples]"""
    entropy_coef: float = Field(default=0.0, ge=0.0)
    """Coefficient of the entropy bonus."""
    use_rollout_logprobs: bool = False
    """Use the engine's logprobs as old logprobs instead of computing them with the trainer."""
    mismatch_correction: Literal["none", "tis", "tis_sequence", "mis", "mis_sequence", "icepop"] = "none"
    """Weight the loss by the ratio of trainer to engine; outside the bounds truncated (tis) or dropped (mis,
    icepop)."""
    mismatch_low: float | None = Field(default=None, ge=0.0, le=1.0)
    """Lower bound of the mismatch ratio. Default: tis 0, mis and icepop 0.5, mis_sequence 0.99."""
    mismatch_high: float | None = Field(default=None, ge=1.0)
    """Upper bound of the mismatch ratio. Default: tis and mis 2, icepop 5, mis_sequence 1.01."""
    mismatch_rejection: Literal[
        "none", "token_k1", "token_k2", "token_k3", "seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k1",
        "seq_max_k2", "seq_max_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    ] = "none"  # fmt: skip
    """Drop tokens, or sequences by their mean, maximum or sum over tokens, where this estimate of the KL divergence of
    engine to trainer exceeds --mismatch-rejection-max. Can be combined with any --mismatch-correction."""
    mismatch_rejection_max: float | None = Field(default=None, gt=0.0)
    """Bound of --mismatch-rejection, e.g. 0.01 for seq_mean_k3. [nats]"""


class SelectionConfig(Section):
    """Selection of the prompts to train on."""

    dynamic_sampling: bool = False
    """Drop groups whose samples all have the same reward (no learning signal) and generate for new prompts until
    --rollout-batch-size groups are kept (DAPO)."""
    dynamic_sampling_max_rounds: int = Field(default=10, ge=1)
    """Maximum rounds of generation per rollout, each with at most --rollout-batch-size prompts. Training uses the
    groups kept by then. 1: drop groups without replacing them."""
    min_group_spread: float = Field(default=0.0, ge=0.0)
    """Dynamic sampling: keep a group if its largest and smallest reward differ by more than this; with --multi-reward
    normalize_then_sum, for any one reward. [reward]"""
    curriculum: Literal["none", "pass_rate"] = "none"
    """`pass_rate`: from the second epoch on, draw prompts that were always or never solved less often: with probability
    4 p (1 - p) for pass rate p. A response passes at --pass-threshold."""
    curriculum_floor: float = Field(default=0.1, gt=0.0, le=1.0)
    """Minimum probability that a prompt is drawn when it comes up in its epoch."""
    curriculum_decay: float = Field(default=0.5, ge=0.0, le=1.0)
    """Weight of a prompt's earlier responses at each new visit: 1 keeps all, 0 only the last visit."""


class ShapingConfig(Section):
    """Length-based reward shaping and masking."""

    overlong_penalty: float = Field(default=0.0, ge=0.0)
    """Maximum penalty on the reward of a response that fills the overlong buffer (DAPO: 1). 0: off."""
    overlong_buffer: int | None = Field(default=None, ge=1)
    """Last tokens before --rollout-max-response-len, over which the overlong penalty grows. Default: a fifth of it, as
    in DAPO. [tokens]"""
    length_penalty: float = Field(default=0.0, ge=0.0)
    """Coefficient of a reward of +-0.5 for responses shorter than others of the group; incorrect responses never gain
    from it (Kimi k1.5). 0: off."""
    mask_truncated: bool = False
    """Exclude truncated responses from the loss and its denominators; their rewards stay in the baseline."""
