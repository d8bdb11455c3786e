"""Checks for invalid or ineffective combinations of algorithm options. See fsdptrain/config/checks.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from fsdptrain.config.effects import Problem, changed, without_effect
from fsdptrain.config.presets import ADVANTAGE_SCALES, LOSS_FIELDS, LOSS_OPTIONS, is_own
from fsdptrain.config.server_checks import SERVER_ENGINE
from fsdptrain.registry import suggest

if TYPE_CHECKING:
    from fsdptrain.config.root import Config

_ROLLOUT_ONLY = (
    "n_samples_per_prompt advantage_estimator advantage_scale multi_reward overlong_penalty overlong_buffer "
    "length_penalty mask_truncated kl_loss_coef kl_loss_type use_unbiased_kl kl_reward_coef kl_reward_type "
    "kl_target kl_horizon entropy_coef ref_load ref_update_interval rollout_temperature rollout_top_p rollout_top_k "
    "rollout_min_p max_unscored_fraction dynamic_sampling curriculum max_staleness "
    f"{' '.join(LOSS_FIELDS)}"
)
_GENERATION = (
    "reward reward_timeout environment rollout_engine rollout_max_response_len rollout_max_batch_tokens "
    "log_num_samples offload_train"
)


def _algorithm(config: Config) -> Iterator[Problem]:
    algorithm = config.algorithm
    if algorithm.algorithm == "sft":
        yield from without_effect(config, _ROLLOUT_ONLY, "with --algorithm sft: leave it out, or use --algorithm grpo")
        if not is_own(algorithm.loss):
            yield from without_effect(config, "loss", "with --algorithm sft, which has no advantages: leave it out")
        if not config.evaluates:
            keys = _GENERATION
            if algorithm.loss_aggregation == "fixed_length":  # divides by the response limit
                keys = keys.replace("rollout_max_response_len ", "")
            reason = "with --algorithm sft that never evaluates: leave it out, or set --eval-interval and --eval-size"
            yield from without_effect(config, keys, reason)
        return
    own_baseline = is_own(algorithm.advantage_estimator) and config.advantage_scale != "group"
    if algorithm.n_samples_per_prompt < 2 and not own_baseline:
        yield (
            f"--n-samples-per-prompt must be at least 2 with --algorithm {algorithm.algorithm}, got "
            f"{algorithm.n_samples_per_prompt}: an advantage compares the samples of one prompt, 8 is usual"
        )
    if not algorithm.use_opsm:
        yield from without_effect(config, "opsm_delta", "without --use-opsm")
    if algorithm.mismatch_correction == "none":
        reason = "without a correction: set --mismatch-correction, e.g. tis"
        yield from without_effect(config, "mismatch_low mismatch_high", reason)
    elif algorithm.use_rollout_logprobs:
        reason = "with --use-rollout-logprobs, where the old logprobs are the engine's: leave one of them out"
        yield from without_effect(config, "mismatch_correction", reason)
    if algorithm.mismatch_rejection == "none":
        reason = "without a rejection: set --mismatch-rejection, e.g. seq_mean_k3"
        yield from without_effect(config, "mismatch_rejection_max", reason)
    elif algorithm.mismatch_rejection_max is None:
        yield (
            f"--mismatch-rejection {algorithm.mismatch_rejection} needs --mismatch-rejection-max, its bound in nats, "
            "e.g. 0.01 for seq_mean_k3"
        )


def _staleness(config: Config) -> Iterator[Problem]:
    """Require a correction for samples generated with older weights."""
    algorithm, ahead = config.algorithm, config.sync.max_staleness
    options = LOSS_OPTIONS.get(algorithm.loss)
    if ahead and config.router.replay == "rollout" and config.rollout.engine == SERVER_ENGINE:
        yield (
            f"--router-replay rollout with --max-staleness {ahead}: servers read tokens again when new weights come, "
            "and no longer know the experts that made them: use --router-replay scoring, or leave one of them out"
        )
    if not ahead or options is None or "mismatch_correction" not in options.reads:
        return  # ipo compares with the engine itself; custom losses are unknown
    if not algorithm.use_rollout_logprobs and algorithm.mismatch_correction == algorithm.mismatch_rejection == "none":
        yield (
            f"--max-staleness {ahead} trains on samples of older weights, and --loss {algorithm.loss} would take them "
            "for the present ones': add --mismatch-correction tis, or --use-rollout-logprobs"
        )


def _kl(config: Config) -> Iterator[Problem]:
    algorithm, interval = config.algorithm, config.ref.update_interval
    if algorithm.algorithm == "sft":
        return
    if not config.needs_reference:
        reason = "without a KL term: set --kl-loss-coef or --kl-reward-coef above 0, e.g. 0.001"
        yield from without_effect(config, "ref_load ref_update_interval kl_target", reason)
    if not algorithm.kl_loss_coef:
        reason = "without a KL term in the loss: set --kl-loss-coef above 0, e.g. 0.001"
        yield from without_effect(config, "kl_loss_type use_unbiased_kl", reason)
    if not algorithm.kl_reward_coef:
        reason = "without a KL term in the reward: set --kl-reward-coef above 0, e.g. 0.001"
        yield from without_effect(config, "kl_reward_type", reason)
    elif algorithm.multi_reward != "sum_then_normalize":
        yield (
            f"--kl-reward-coef {algorithm.kl_reward_coef:g} is added to the sum of the rewards, which --multi-reward "
            f"{algorithm.multi_reward} does not look at: use --kl-loss-coef"
        )
    elif config.shaping.mask_truncated:
        yield (
            f"--kl-reward-coef {algorithm.kl_reward_coef:g} needs the KL divergence of all samples of a group, and "
            "--mask-truncated scores none for truncated ones: use --kl-loss-coef, or leave one of them out"
        )
    if algorithm.kl_target is None:
        yield from without_effect(config, "kl_horizon", "without an adaptive coefficient: set --kl-target")
    elif algorithm.kl_loss_coef and algorithm.kl_reward_coef:
        yield (
            f"--kl-target {algorithm.kl_target:g} adapts one coefficient, but --kl-loss-coef "
            f"{algorithm.kl_loss_coef:g} and --kl-reward-coef {algorithm.kl_reward_coef:g} are both given: choose one"
        )
    elif algorithm.kl_horizon < config.samples_per_rollout:
        yield (
            f"--kl-horizon {algorithm.kl_horizon} is less than the {config.samples_per_rollout} samples of a rollout, "
            "after which the coefficient is adapted: raise it, 10000 is usual"
        )
    if config.lora.rank:
        reason = "with --lora-rank, whose reference is the model without the adapter: leave it out"
        yield from without_effect(config, "ref_update_interval", reason)
    if interval == 1 and config.on_policy and config.needs_reference:
        yield (
            "--ref-update-interval 1 makes every KL divergence 0 when each rollout is one optimizer step, since the "
            f"policy is its own reference: raise it, or set --global-batch-size below {config.samples_per_rollout}"
        )


def _loss(config: Config) -> Iterator[Problem]:
    """Report options that the chosen loss does not read or that have no effect on-policy."""
    algorithm = config.algorithm
    if is_own(algorithm.loss) or algorithm.algorithm == "sft":
        return  # custom losses are unknown; for sft, only the algorithm selects the loss
    options = LOSS_OPTIONS.get(algorithm.loss)
    if options is None:
        yield _unknown("--loss", algorithm.loss, LOSS_OPTIONS)
        return
    if algorithm.loss == "sft":
        yield "--loss sft learns from labels, not from rewards: use --algorithm sft, or choose another loss"
    unread = " ".join(name for name in LOSS_FIELDS if name not in options.reads)
    yield from without_effect(config, unread, f"with --loss {algorithm.loss}, which does not read it: leave it out")
    if config.on_policy and not algorithm.use_rollout_logprobs:
        reason = (
            "when each rollout is one optimizer step, where the policy ratio is always 1: "
            f"set --global-batch-size below {config.samples_per_rollout} or --steps-per-rollout above 1, or leave it "
            "out"
        )
        yield from without_effect(config, " ".join(sorted(options.idle_on_policy)), reason)


def _selection(config: Config) -> Iterator[Problem]:
    selection = config.selection
    if not selection.dynamic_sampling:
        yield from without_effect(config, "dynamic_sampling_max_rounds min_group_spread", "without --dynamic-sampling")
    if selection.curriculum == "none":
        reason = "without a curriculum: set --curriculum pass_rate"
        yield from without_effect(config, "curriculum_floor curriculum_decay", reason)
        if not config.evaluates and not config.shaping.length_penalty:
            reason = (
                "where nothing is evaluated, without a curriculum and without --length-penalty: set --eval-interval, "
                "or leave it out"
            )
            yield from without_effect(config, "pass_threshold", reason)


def _advantages(config: Config) -> Iterator[Problem]:
    algorithm, scale = config.algorithm, config.advantage_scale
    if algorithm.algorithm == "sft":
        return
    own = is_own(algorithm.advantage_estimator)
    if not own and algorithm.advantage_estimator not in ADVANTAGE_SCALES:
        yield _unknown("--advantage-estimator", algorithm.advantage_estimator, ADVANTAGE_SCALES)
    if algorithm.multi_reward == "sum_then_normalize":
        return
    shaping = config.shaping
    if len(config.reward.reward) + bool(shaping.overlong_penalty) + bool(shaping.length_penalty) < 2:
        reason = "with one reward: name another in --reward, or leave it out"
        yield from without_effect(config, "multi_reward", reason)
    if scale != "group" and not (own and scale == "none"):
        yield (
            f"--multi-reward {algorithm.multi_reward} divides each reward by its std within the group, which "
            f"--advantage-estimator {algorithm.advantage_estimator} with --advantage-scale {algorithm.advantage_scale} "
            "does not: add --advantage-scale group, or leave --multi-reward out"
        )


def _shaping(config: Config) -> Iterator[Problem]:
    if config.algorithm.algorithm == "sft":
        return
    if not config.shaping.overlong_penalty:
        reason = "without a penalty: set --overlong-penalty, 1 is usual"
        yield from without_effect(config, "overlong_buffer", reason)
    elif config.overlong_buffer > config.rollout.max_response_len:
        yield (
            f"--overlong-buffer {config.overlong_buffer} is more than --rollout-max-response-len "
            f"{config.rollout.max_response_len}: it is the last part of it, a fifth is usual"
        )


def _unknown(flag: str, name: str, table: Mapping[str, object]) -> str:
    takes = f"it takes {', '.join(table)} or package.module:function"
    return f"{flag} does not know {name!r}{suggest(name, table)} ({takes})"


def _batch(config: Config) -> Iterator[Problem]:
    size, samples = config.batch.global_batch_size, config.samples_per_rollout
    if config.algorithm.algorithm == "sft":
        if size and list(changed(config, "rollout_batch_size")) and size != config.rollout.batch_size:
            yield (
                f"--rollout-batch-size {config.rollout.batch_size} and --global-batch-size {size} differ: "
                "with --algorithm sft both mean the samples of one optimizer step, give one of them"
            )
        reason = "with --algorithm sft, which takes new samples for each optimizer step: leave it out"
        yield from without_effect(config, "steps_per_rollout epochs_per_rollout", reason)
        return
    if size and samples % size:
        yield (
            f"--global-batch-size {size} must divide --rollout-batch-size {config.rollout.batch_size} x "
            f"--n-samples-per-prompt {config.algorithm.n_samples_per_prompt} = {samples} samples, "
            f"e.g. {_divisor(samples, size)}"
        )
    elif config.batch.steps_per_rollout:
        yield from _steps(config, config.batch.steps_per_rollout)


def _steps(config: Config, steps: int) -> Iterator[Problem]:
    size, samples, epochs = config.batch.global_batch_size, config.samples_per_rollout, config.batch.epochs_per_rollout
    if steps % epochs:
        yield (
            f"--steps-per-rollout {steps} must be a multiple of --epochs-per-rollout {epochs}: each epoch has as many "
            f"optimizer steps, e.g. {epochs * (steps // epochs + 1)}"
        )
    elif size and size * steps != samples * epochs:
        yield (
            f"--steps-per-rollout {steps} and --global-batch-size {size} do not agree: {samples} samples"
            f"{f', {epochs} times,' if epochs > 1 else ''} make {samples * epochs // size} steps of {size}: give one "
            "of them"
        )
    elif steps > samples * epochs:
        yield (
            f"--steps-per-rollout {steps} is more than --rollout-batch-size {config.rollout.batch_size} x "
            f"--n-samples-per-prompt {config.algorithm.n_samples_per_prompt} = {samples} samples give, a sample for "
            f"each step of an epoch: at most {samples * epochs}"
        )


def _router(config: Config) -> Iterator[Problem]:
    router = config.router
    if router.aux_loss_coef != "config" and router.aux_loss_coef < 0:
        yield f"--router-aux-loss-coef must be at least 0 or `config`, got {router.aux_loss_coef:g}"
    for flag, given in {"--lora-rank": config.lora.rank, "--compile": config.model.compile}.items():
        if router.bias_update_rate and given:
            yield f"--router-bias-update-rate does not work with {flag} yet: leave one of them out"
    if config.algorithm.algorithm == "sft":
        yield from without_effect(config, "router_replay", "with --algorithm sft, which has no routes to replay")
    elif router.replay == "scoring" and not config.scores_policy:
        reason = "where the policy is not scored: use --router-replay rollout, or leave it out"
        yield from without_effect(config, "router_replay", reason)


def _divisor(samples: int, size: int) -> int:
    """Return the largest divisor of `samples` that is at most `size`."""
    return next(divisor for divisor in range(min(size, samples), 0, -1) if samples % divisor == 0)


ALGORITHM_CHECKS: tuple[Callable[[Config], Iterator[Problem]], ...] = (
    _algorithm, _staleness, _kl, _loss, _advantages, _shaping, _selection, _batch, _router,
)  # fmt: skip
