"""Build the rules for group selection, reward shaping, advantages and the loss from the configuration."""

from typing import TYPE_CHECKING

from fsdptrain import registry
from fsdptrain.algo.advantages import ADVANTAGES, AdvantageRule
from fsdptrain.algo.corrections import CORRECTIONS
from fsdptrain.config import Config
from fsdptrain.config.algorithm import AlgorithmConfig
from fsdptrain.errors import ConfigError
from fsdptrain.protocols import RewardFunction
from fsdptrain.rewards.build import WeightedSum
from fsdptrain.trainer.samples.selection import SelectionRules
from fsdptrain.types import LossConfig

if TYPE_CHECKING:
    from fsdptrain.algo.shaping import ShapingRule

SHAPING_TERMS = ("overlong", "length")  # keys of fsdptrain.algo.shaping.SHAPES


def shaping_rule(config: Config) -> "ShapingRule | None":
    """Build the rule that shapes rewards by length. None if no shaping term is enabled."""
    coefficients = {"overlong": config.shaping.overlong_penalty, "length": config.shaping.length_penalty}
    coefficients = {name: coefficient for name, coefficient in coefficients.items() if coefficient}
    if not coefficients:
        return None
    from fsdptrain.algo.shaping import ShapingRule

    return ShapingRule(
        max_response_len=config.rollout.max_response_len,
        overlong_buffer=config.overlong_buffer,
        coefficients=coefficients,
        pass_threshold=config.reward.pass_threshold,
    )


def advantage_rule(config: Config, reward: RewardFunction | WeightedSum) -> AdvantageRule:
    """Build the rule that turns rewards into advantages.

    Raises ConfigError if the estimator cannot be imported or is not a function, or if it needs rewards with names and
    weights and has none.
    """
    name = config.algorithm.advantage_estimator
    estimate = registry.resolve(name, ADVANTAGES, flag="--advantage-estimator", call=lambda f: f("rewards", "lengths"))
    if not callable(estimate):
        raise ConfigError(f"--advantage-estimator {name} is not a function: it is (rewards, lengths) -> advantages")
    if name not in ADVANTAGES:
        from fsdptrain.algo.estimators import user_estimator

        estimate = user_estimator(estimate, name)
    weights = None
    if config.algorithm.multi_reward == "normalize_then_sum":
        if not isinstance(reward, WeightedSum):
            raise ConfigError(
                "--multi-reward normalize_then_sum needs rewards with names and weights: in place of "
                "Trainer(reward=...), give --reward package.module:function=weight for each"
            )
        shaping = shaping_rule(config)
        weights = {**reward.weights, **(shaping.coefficients if shaping else {})}
        weights = {name: weight for name, weight in weights.items() if weight}  # weight 0: reported only
    return AdvantageRule(estimate, config.advantage_scale, weights)


def selection_rules(config: Config, advantages: AdvantageRule) -> SelectionRules:
    """Build the rules that select groups.

    Groups are judged before shaping, on what `advantages` compares: the reward, or each part with a non-zero weight.
    """
    selection, pass_threshold = config.selection, config.reward.pass_threshold
    if not selection.dynamic_sampling:
        return SelectionRules(pass_threshold=pass_threshold)
    return SelectionRules(
        dynamic=True,
        max_rounds=selection.dynamic_sampling_max_rounds,
        min_spread=selection.min_group_spread,
        pass_threshold=pass_threshold,
        parts=tuple(name for name in advantages.weights or () if name not in SHAPING_TERMS),
    )


def loss_config(algorithm: AlgorithmConfig) -> LossConfig:
    """Resolve the options of the loss, with every default filled in."""
    high, correction = algorithm.eps_clip_high, CORRECTIONS[algorithm.mismatch_correction]
    return LossConfig(
        eps_clip=algorithm.eps_clip,
        eps_clip_high=algorithm.eps_clip if high is None else high,
        eps_clip_c=algorithm.eps_clip_c,
        is_cap_high=algorithm.is_cap_high,
        sapo_tau_pos=algorithm.sapo_tau_pos,
        sapo_tau_neg=algorithm.sapo_tau_neg,
        prime_rl_kl_coef=algorithm.prime_rl_kl_coef,
        use_opsm=algorithm.use_opsm,
        opsm_delta=algorithm.opsm_delta,
        mismatch_correction=algorithm.mismatch_correction,
        mismatch_low=correction.low if algorithm.mismatch_low is None else algorithm.mismatch_low,
        mismatch_high=correction.high if algorithm.mismatch_high is None else algorithm.mismatch_high,
        mismatch_rejection=algorithm.mismatch_rejection,
        mismatch_rejection_max=algorithm.mismatch_rejection_max or 0.0,
        use_rollout_logprobs=algorithm.use_rollout_logprobs,
        kl_loss_coef=algorithm.kl_loss_coef,
        kl_loss_type=algorithm.kl_loss_type,
        use_unbiased_kl=algorithm.use_unbiased_kl,
        entropy_coef=algorithm.entropy_coef,
    )
