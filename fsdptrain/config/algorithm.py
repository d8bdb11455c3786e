"""Sections of the path from rewards to gradients: algorithm, selection of prompts, reward shaping."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from fsdptrain.config.presets import ADVANTAGE_SCALES, LOSS_FIELDS, LOSS_OPTIONS, MISMATCH_BOUNDS, is_custom
from fsdptrain.config.rules import NEEDS_KL, RL_ONLY, Fact, IdleWith, Problem, Requires
from fsdptrain.config.section import Section
from fsdptrain.registry import unknown_name

if TYPE_CHECKING:
    from fsdptrain.config.root import Config

_CORRECTS = Requires("mismatch_correction", fix="set it, e.g. tis")


class AlgorithmConfig(Section):
    """Computation of the loss from rewards."""

    NAME = "algorithm"
    FACTS = ((Fact.ZERO_ADVANTAGE, "kl_loss_coef"), (Fact.ZERO_ADVANTAGE, "entropy_coef"))

    algorithm: Literal[
        "grpo", "dapo", "dr_grpo", "gspo", "cispo", "sapo", "prime_rl", "reinforce", "rloo", "reinforce++_baseline",
        "opd", "sft",
    ] = "grpo"  # fmt: skip
    """Preset of loss, aggregation, advantage and other options; values that you set override it. `sft`: supervised
    fine-tuning on prompts and labels; `opd`: on-policy distillation from --opd-teacher; all others: reinforcement
    learning. See docs/algorithms.md."""
    loss: str = "grpo"
    """grpo, gspo, cispo, sapo, prime_rl, reinforce, sft, or your own `package.module:function`. Default:
    --algorithm's."""
    n_samples_per_prompt: Annotated[int, RL_ONLY] = Field(default=8, ge=1)
    """Completions per prompt: the group size."""
    advantage_estimator: Annotated[str, RL_ONLY] = "grpo"
    """`grpo`: (reward - mean) / std within the group. `dr_grpo`: reward - mean. `rloo`: reward - mean of the others.
    `reinforce++_baseline`: reward - mean, whitened over the batch. `none`: 0, rewards are only logged. Or your own
    `package.module:function`: (rewards, lengths) of a group -> advantages."""
    advantage_scale: Annotated[Literal["auto", "group", "batch", "whiten", "none"], RL_ONLY] = "auto"
    """Divide advantages by the std of rewards in the group (`group`) or the batch of all ranks (`batch`), or whiten
    them over the tokens of the batch (`whiten`). `auto`: the scale of the estimator, group for grpo."""
    eps_clip: Annotated[float, RL_ONLY] = Field(default=0.2, gt=0.0, lt=1.0)
    """The policy ratio is clipped below 1 - eps_clip. prime_rl: largest decrease of a token's probability."""
    eps_clip_high: Annotated[float | None, RL_ONLY] = Field(default=None, gt=0.0)
    """The policy ratio is clipped above 1 + eps_clip_high. prime_rl: largest increase. Default: eps_clip."""
    eps_clip_c: Annotated[float | None, RL_ONLY] = Field(default=None, gt=1.0)
    """Dual clip: bound of the loss for negative advantages, usually 3. Default: off."""
    is_cap_high: Annotated[float, RL_ONLY] = Field(default=5.0, ge=1.0)
    """cispo: cap of the importance weight. Absolute, not 1 + eps."""
    sapo_tau_pos: Annotated[float, RL_ONLY] = Field(default=1.0, gt=0.0)
    """sapo: steepness of the gate for positive advantages."""
    sapo_tau_neg: Annotated[float, RL_ONLY] = Field(default=1.05, gt=0.0)
    """sapo: steepness of the gate for other advantages."""
    use_opsm: Annotated[bool, RL_ONLY] = False
    """Drop sequences with negative advantage that have moved away from the old policy (off-policy sequence masking)."""
    opsm_delta: Annotated[float, RL_ONLY, Requires("use_opsm")] = Field(default=1e-4, ge=0.0)
    """Threshold of --use-opsm: mean of old minus new logprob over the tokens of a sequence. [nats]"""
    loss_aggregation: Literal["token_mean", "sequence_mean", "fixed_length", "sequence_sum"] = "token_mean"
    """Average over the step and all ranks: of tokens, of sequence means or sums, or over --rollout-max-response-len."""
    kl_loss_coef: Annotated[float, RL_ONLY] = Field(default=0.0, ge=0.0)
    """Coefficient of the KL divergence to the reference model in the loss. 0: no reference model. --algorithm grpo, the
    default, sets 0.001, unless you set another --loss."""
    kl_loss_type: Annotated[Literal["k1", "k2", "k3", "low_var_kl"], RL_ONLY, NEEDS_KL] = "k3"
    """Estimator of the KL divergence. `low_var_kl`: clamped k3."""
    use_unbiased_kl: Annotated[bool, RL_ONLY, NEEDS_KL] = False
    """Multiply the KL by the policy ratio, with its gradient: KL and gradient are then unbiased off-policy."""
    entropy_coef: Annotated[float, RL_ONLY] = Field(default=0.0, ge=0.0)
    """Coefficient of the entropy bonus in the loss."""
    use_rollout_logprobs: Annotated[bool, RL_ONLY] = False
    """Use the engine's logprobs as old logprobs instead of computing them with the trainer."""
    mismatch_correction: Annotated[
        Literal["none", "tis", "tis_sequence", "mis", "mis_sequence", "icepop"],
        RL_ONLY,
        IdleWith("use_rollout_logprobs"),
    ] = "none"
    """Weight tokens by the ratio of trainer to engine: truncated (tis), or 0 outside the bounds (mis, icepop)."""
    mismatch_low: Annotated[float | None, RL_ONLY, _CORRECTS] = Field(default=None, ge=0.0, le=1.0)
    """Lower bound of the mismatch ratio. Default: tis 0, mis and icepop 0.5, mis_sequence 0.99."""
    mismatch_high: Annotated[float | None, RL_ONLY, _CORRECTS] = Field(default=None, ge=1.0)
    """Upper bound of the mismatch ratio. Default: tis and mis 2, icepop 5, mis_sequence 1.01."""

    @property
    def clip_high(self) -> float:
        """Upper clip of the policy ratio, as a distance from 1."""
        return self.eps_clip if self.eps_clip_high is None else self.eps_clip_high

    @property
    def mismatch_bounds(self) -> tuple[float, float]:
        """Bounds of the mismatch ratio: low <= 1 <= high."""
        low, high = MISMATCH_BOUNDS[self.mismatch_correction]
        return (
            low if self.mismatch_low is None else self.mismatch_low,
            high if self.mismatch_high is None else self.mismatch_high,
        )

    def problems(self, config: "Config") -> Iterator[Problem]:
        if self.algorithm == "sft":
            if not is_custom(self.loss):
                reason = "with --algorithm sft, which has no advantages: remove it"
                yield from config.without_effect(["loss"], reason)
            return
        yield from self._advantage_problems(config)
        yield from self._loss_problems(config)
        yield from self._staleness_problems(config)

    def _advantage_problems(self, config: "Config") -> Iterator[Problem]:
        custom, scale = is_custom(self.advantage_estimator), config.advantage_scale
        compares = self.advantage_estimator != "none" and not (custom and scale != "group")
        teaches = config.has(Fact.TEACHES) or is_custom(self.loss)
        if self.advantage_estimator == "none" and not teaches:
            yield (
                f"--algorithm {self.algorithm} with --advantage-estimator none learns from a teacher alone: name one "
                "by --opd-teacher (a checkpoint or the URL of a vLLM server), or another estimator"
            )
        if self.n_samples_per_prompt < 2 and compares:
            yield (
                f"--n-samples-per-prompt must be at least 2 with --algorithm {self.algorithm}, got "
                f"{self.n_samples_per_prompt}: an advantage compares the samples of one prompt, 8 is usual"
            )
        if not custom and self.advantage_estimator not in ADVANTAGE_SCALES:
            yield unknown_name("--advantage-estimator", self.advantage_estimator, ADVANTAGE_SCALES)

    def _loss_problems(self, config: "Config") -> Iterator[Problem]:
        """Report options that the loss does not read, or that have no effect on-policy."""
        if is_custom(self.loss):  # custom losses are unknown
            return
        options = LOSS_OPTIONS.get(self.loss)
        if options is None:
            yield unknown_name("--loss", self.loss, LOSS_OPTIONS)
            return
        if self.loss == "sft":
            yield "--loss sft learns from labels, not from rewards: use --algorithm sft, or choose another loss"
        unread = [name for name in LOSS_FIELDS if name not in options.reads]
        yield from config.without_effect(unread, f"with --loss {self.loss}, which does not read it: remove it")
        if config.on_policy and not self.use_rollout_logprobs:
            reason = (
                "when each rollout is one optimizer step, where the policy ratio is always 1: set --global-batch-size "
                f"below {config.samples_per_rollout}, or remove it"
            )
            yield from config.without_effect(sorted(options.idle_on_policy), reason)

    def _staleness_problems(self, config: "Config") -> Iterator[Problem]:
        """Require a correction for samples generated with older weights."""
        ahead, options = config.sync.max_staleness, LOSS_OPTIONS.get(self.loss)
        if not ahead or options is None or "mismatch_correction" not in options.reads:
            return  # prime_rl compares with the engine itself; custom losses are unknown
        if not self.use_rollout_logprobs and self.mismatch_correction == "none":
            yield (
                f"--max-staleness {ahead} trains on samples of older weights, and --loss {self.loss} does not correct "
                "for that: add --mismatch-correction tis, or --use-rollout-logprobs"
            )


class SelectionConfig(Section):
    """Selection of the prompts to train on."""

    NAME = "selection"

    dynamic_sampling: Annotated[bool, RL_ONLY] = False
    """Drop groups whose samples all have the same reward (no learning signal) and generate from new prompts until
    --rollout-batch-size groups are kept (DAPO)."""
    dynamic_sampling_max_rounds: Annotated[int, Requires("dynamic_sampling")] = Field(default=10, ge=1)
    """Maximum rounds of generation per rollout, each with at most --rollout-batch-size prompts. Training uses the
    groups kept by then. 1: drop groups without replacing them."""


class ShapingConfig(Section):
    """Length-based reward shaping and masking."""

    NAME = "shaping"

    overlong_penalty: Annotated[float, RL_ONLY] = Field(default=0.0, ge=0.0)
    """Maximum penalty on the reward of a response that fills the overlong buffer (DAPO: 1). 0: off."""
    overlong_buffer: Annotated[int | None, RL_ONLY, Requires("overlong_penalty", fix="set it, 1 is usual")] = Field(
        default=None, ge=1
    )
    """The overlong penalty grows over this many tokens before --rollout-max-response-len. Default: a fifth. [tokens]"""
    mask_truncated: Annotated[bool, RL_ONLY] = False
    """Exclude truncated responses from the loss and its denominators; their rewards stay in the baseline."""
