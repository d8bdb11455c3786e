"""Combinations of the algorithm's options that cannot work or have no effect. See fsdptrain/config/checks.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from fsdptrain.config.effects import Problem, changed, without_effect
from fsdptrain.config.presets import LOSS_FIELDS, LOSS_OPTIONS, is_own_loss
from fsdptrain.registry import suggest

if TYPE_CHECKING:
    from fsdptrain.config.root import Config

_ROLLOUT_ONLY = (
    "n_samples_per_prompt advantage_estimator kl_loss_coef kl_loss_type use_unbiased_kl entropy_coef ref_load "
    f"rollout_temperature max_unscored_fraction {' '.join(LOSS_FIELDS)}"
)
_GENERATION = "reward rollout_engine rollout_max_response_len rollout_max_batch_tokens log_num_samples"


def _algorithm(config: Config) -> Iterator[Problem]:
    algorithm = config.algorithm
    if algorithm.algorithm == "sft":
        yield from without_effect(config, _ROLLOUT_ONLY, "with --algorithm sft: leave it out, or use --algorithm grpo")
        if not is_own_loss(algorithm.loss):
            yield from without_effect(config, "loss", "with --algorithm sft, which has no advantages: leave it out")
        if not config.evaluates:
            keys = _GENERATION
            if algorithm.loss_aggregation == "fixed_length":  # which divides by the longest response
                keys = keys.replace("rollout_max_response_len ", "")
            reason = "with --algorithm sft that never evaluates: leave it out, or set --eval-interval and --eval-size"
            yield from without_effect(config, keys, reason)
        return
    if algorithm.n_samples_per_prompt < 2:
        yield (
            f"--n-samples-per-prompt must be at least 2 with --algorithm {algorithm.algorithm}, got "
            f"{algorithm.n_samples_per_prompt}: an advantage compares the samples of one prompt, 8 is usual"
        )
    if not algorithm.kl_loss_coef:
        reason = "without a KL term: set --kl-loss-coef above 0, e.g. 0.001"
        yield from without_effect(config, "kl_loss_type use_unbiased_kl ref_load", reason)
    if not algorithm.use_opsm:
        yield from without_effect(config, "opsm_delta", "without --use-opsm")
    if algorithm.mismatch_correction == "none":
        reason = "without a correction: set --mismatch-correction, e.g. tis"
        yield from without_effect(config, "mismatch_low mismatch_high", reason)
    elif algorithm.use_rollout_logprobs:
        reason = "with --use-rollout-logprobs, where the old logprobs are the engine's: leave one of them out"
        yield from without_effect(config, "mismatch_correction", reason)


def _loss(config: Config) -> Iterator[Problem]:
    """Options that the chosen loss does not read, or that on-policy training leaves without work."""
    algorithm = config.algorithm
    if is_own_loss(algorithm.loss) or algorithm.algorithm == "sft":
        return  # nothing is known of it; nothing but its data makes it
    options = LOSS_OPTIONS.get(algorithm.loss)
    if options is None:
        takes = f"it takes {', '.join(LOSS_OPTIONS)} or package.module:function"
        yield f"--loss does not know {algorithm.loss!r}{suggest(algorithm.loss, dict(LOSS_OPTIONS))} ({takes})"
        return
    if algorithm.loss == "sft":
        yield "--loss sft learns from labels, not from rewards: use --algorithm sft, or choose another loss"
    unread = " ".join(name for name in LOSS_FIELDS if name not in options.reads)
    yield from without_effect(config, unread, f"with --loss {algorithm.loss}, which does not read it: leave it out")
    if config.on_policy and not algorithm.use_rollout_logprobs:
        reason = (
            "when each rollout is one optimizer step, where the policy ratio is always 1: "
            f"set --global-batch-size below {config.samples_per_rollout}, or leave it out"
        )
        yield from without_effect(config, " ".join(sorted(options.idle_on_policy)), reason)


def _batch(config: Config) -> Iterator[Problem]:
    size, samples = config.batch.global_batch_size, config.samples_per_rollout
    if config.algorithm.algorithm == "sft":
        if size and list(changed(config, "rollout_batch_size")) and size != config.rollout.batch_size:
            yield (
                f"--rollout-batch-size {config.rollout.batch_size} and --global-batch-size {size} differ: "
                "with --algorithm sft both mean the samples of one optimizer step, give one of them"
            )
        return
    if size and samples % size:
        yield (
            f"--global-batch-size {size} must divide --rollout-batch-size {config.rollout.batch_size} x "
            f"--n-samples-per-prompt {config.algorithm.n_samples_per_prompt} = {samples} samples, "
            f"e.g. {_divisor(samples, size)}"
        )


def _router(config: Config) -> Iterator[Problem]:
    router = config.router
    if router.aux_loss_coef != "config" and router.aux_loss_coef < 0:
        yield f"--router-aux-loss-coef must be at least 0 or `config`, got {router.aux_loss_coef:g}"
    if config.algorithm.algorithm == "sft":
        yield from without_effect(config, "router_replay", "with --algorithm sft, which has no routes to replay")
    elif router.replay == "scoring" and (not config.needs_old_logprobs or config.algorithm.use_rollout_logprobs):
        reason = "where no old logprobs are scored: use --router-replay rollout, or leave it out"
        yield from without_effect(config, "router_replay", reason)


def _divisor(samples: int, size: int) -> int:
    """The largest divisor of `samples` that is not above `size`."""
    return next(divisor for divisor in range(min(size, samples), 0, -1) if samples % divisor == 0)


ALGORITHM_CHECKS: tuple[Callable[[Config], Iterator[Problem]], ...] = (_algorithm, _loss, _batch, _router)
