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
    advantage_estimator: str = "grpo"
    """`grpo`: (reward - mean) / std within the group. `dr_grpo`: reward - mean. `rloo`: reward - mean of the others.
    `reinforce++_baseline`: reward - mean, whitened over the batch. `max_rl`: (reward - mean) / mean. `opo`: reward -
    mean weighted by length. Or `package.module:function`: (rewards, lengths) of a group -> advantages."""
    advantage_scale: Literal["auto", "group", "batch", "whiten", "none"] = "auto"
    """Divide advantages by the std of the rewards in the group, or of all ranks' rewards (`batch`), or whiten them over
    the tokens of the batch. `auto`: as the estimator says, group for grpo."""
    multi_reward: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """Several rewards: the weighted sum is one reward, or (GDPO) each is normalised within its group, then summed by
    weight, then whitened over the batch."""
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
    """Coefficient of the KL divergence to the reference model in the loss. 0 here and in the reward: there is none."""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "k3"
    """Estimator of the KL divergence. `low_var_kl`: k3 within bounds."""
    use_unbiased_kl: bool = False
    """Multiply the KL by the policy ratio, with its gradient: unbiased off-policy, and in its gradient."""
    kl_reward_coef: float = Field(default=0.0, ge=0.0)
    """Coefficient of the KL divergence of old policy to reference, summed over a response and taken from its reward."""
    kl_reward_type: Literal["k1", "k2", "k3", "low_var_kl"] = "k1"
    """Estimator of the KL divergence in the reward, where none needs a gradient: k1 is unbiased."""
    kl_target: float | None = Field(default=None, gt=0.0)
    """Adapt the KL coefficient, after each rollout, so that the KL divergence comes to this. Default: off. [nats for
    each token]"""
    kl_horizon: int = Field(default=10_000, ge=1)
    """Samples in which the coefficient grows or shrinks by a fifth, at most. [samples]"""
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
    mismatch_rejection: Literal[
        "none", "token_k1", "token_k2", "token_k3", "seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k1",
        "seq_max_k2", "seq_max_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    ] = "none"  # fmt: skip
    """Drop tokens, or sequences by their mean, largest or summed token, where this estimate of the KL divergence of
    engine to trainer is above --mismatch-rejection-max; beside any correction."""
    mismatch_rejection_max: float | None = Field(default=None, gt=0.0)
    """Bound of the rejection, e.g. 0.01 for seq_mean_k3. [nats]"""


class SelectionConfig(Section):
    """Which prompts are trained on."""

    dynamic_sampling: bool = False
    """Leave out groups whose samples all earned the same reward, which teach nothing, and ask new prompts in their
    place, until --rollout-batch-size groups are kept (DAPO)."""
    dynamic_sampling_max_rounds: int = Field(default=10, ge=1)
    """Rounds of generation in one rollout, at most; each asks for no more prompts than --rollout-batch-size. What is
    kept by then is trained on; 1: leave out, and ask no others."""
    min_group_spread: float = Field(default=0.0, ge=0.0)
    """Dynamic sampling: keep a group if its largest and smallest reward differ by more than this; with --multi-reward
    normalize_then_sum, those of any one reward. [reward]"""
    curriculum: Literal["none", "pass_rate"] = "none"
    """`pass_rate`: from the second epoch on, ask prompts that were always or never solved less often, by 4 p (1 - p)
    of their pass rate p. What passes: --pass-threshold."""
    curriculum_floor: float = Field(default=0.1, gt=0.0, le=1.0)
    """Least chance that a prompt is asked when it comes up in its epoch."""
    curriculum_decay: float = Field(default=0.5, ge=0.0, le=1.0)
    """Weight of a prompt's earlier answers each time it is asked anew: 1 remembers all, 0 only the last."""


class ShapingConfig(Section):
    """What the length of a response does to its reward, and to its place in the loss."""

    overlong_penalty: float = Field(default=0.0, ge=0.0)
    """Taken from the reward of a response as it fills the overlong buffer, at most this much (DAPO: 1). 0: off."""
    overlong_buffer: int | None = Field(default=None, ge=1)
    """The last tokens before rollout_max_response_len, in which that penalty grows. Default: a fifth of it, as in
    DAPO. [tokens]"""
    length_penalty: float = Field(default=0.0, ge=0.0)
    """Coefficient of a reward of +-0.5 for being shorter than others of the group; a wrong answer gains nothing by it
    (Kimi k1.5). 0: off."""
    mask_truncated: bool = False
    """Leave truncated responses out of the loss and its denominators; their rewards stay in the baseline."""
