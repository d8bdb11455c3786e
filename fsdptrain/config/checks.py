"""Combinations that cannot work, and options that would be accepted and have no effect: both are errors.

Each check yields lines that name the flags, the values and the way out; the first one is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from fsdptrain.config.keys import Key, all_keys
from fsdptrain.config.presets import LOSS_FIELDS, LOSS_OPTIONS, is_own_loss, preset_values
from fsdptrain.errors import ConfigError
from fsdptrain.registry import plugin_names, suggest

if TYPE_CHECKING:
    from fsdptrain.config.root import Config


class NoEffectError(ConfigError):
    """An option that does nothing beside the others. `key`: its flat name."""

    def __init__(self, message: str, key: str) -> None:
        super().__init__(message)
        self.key = key


Problem = str | NoEffectError
LOGGER_NAMES = ("console", "wandb", "trackio")


def check(config: Config) -> None:
    """ConfigError with the first problem of the whole configuration."""
    for find in _CHECKS:
        for problem in find(config):
            raise _error(problem)


def check_data_options(config: Config) -> None:
    """ConfigError for an option that --prompt-data cannot use. Not in `check`: Python may hand over its own data."""
    for problem in _columns(config):
        raise _error(problem)


def check_world_size(config: Config, world_size: int) -> None:
    """ConfigError where the number of processes does not fit. It is known only when they have started."""
    replicas = config.fsdp.replicate_size
    if world_size % replicas:
        raise ConfigError(
            f"--fsdp-replicate-size {replicas} must divide the number of processes, {world_size}: "
            "world size = replicas x shards"
        )


def check_processes(config: Config, *, world_size: int, local_world_size: int) -> None:
    """ConfigError where other processes were started than the flags say, or more or fewer than can be used."""
    wanted, num_nodes = config.launch.nproc_per_node, world_size // local_world_size
    remedy = "leave it out, or start with the fsdptrain command or torchrun"
    if wanted not in (None, local_world_size):
        raise ConfigError(
            f"--nproc-per-node {wanted} does not fit the {local_world_size} processes that were started here: {remedy}"
        )
    if config.launch.nnodes not in (1, num_nodes):
        raise ConfigError(
            f"--nnodes {config.launch.nnodes} does not fit the {num_nodes} machines that were started: {remedy}"
        )
    check_world_size(config, world_size)


def _error(problem: Problem) -> ConfigError:
    return ConfigError(problem) if isinstance(problem, str) else problem


def _changed(config: Config, *keys: str) -> Iterator[str]:
    """Those of `keys` (flat names) that somebody chose: not the default, nor what the algorithm's preset says."""
    for flat in keys:
        key = all_keys()[flat]
        value = getattr(getattr(config, key.section), key.name)
        if value != _unchosen(config, key):
            yield flat


def _unchosen(config: Config, key: Key) -> object:
    default = key.field.get_default(call_default_factory=True)
    if key.section != "algorithm":
        return default
    return preset_values(config.algorithm.algorithm, config.algorithm.loss).get(key.name, default)


def _without_effect(config: Config, keys: str, reason: str) -> Iterator[Problem]:
    for flat in _changed(config, *keys.split()):
        yield NoEffectError(f"{all_keys()[flat].flag} has no effect {reason}", flat)


def _model(config: Config) -> Iterator[Problem]:
    if not config.model.hf_checkpoint:
        yield "--hf-checkpoint is missing: the model to train, e.g. --hf-checkpoint Qwen/Qwen3-4B or a local folder"
    if config.model.fp16 and config.model.bf16:
        yield "--fp16 and --bf16 are both on: choose one, e.g. --fp16 --no-bf16"


def _data(config: Config) -> Iterator[Problem]:
    if not config.data.apply_chat_template:
        yield from _without_effect(config, "chat_template_kwargs", "with --no-apply-chat-template: leave it out")


def _columns(config: Config) -> Iterator[Problem]:
    """Options that the form of the data makes meaningless."""
    names = [name.partition("?")[0] for name in (config.data.prompt_data, config.data.eval_prompt_data) if name]
    generated = [name.startswith("reasoning_gym:") for name in names]
    files = [name.endswith((".jsonl", ".json", ".parquet")) for name in names]
    if all(generated):
        reason = "with reasoning_gym data, which has no columns: leave it out"
        yield from _without_effect(config, "input_key label_key metadata_key", reason)
    if not any(generated):
        yield from _without_effect(config, "data_size", "on data of a fixed size: only reasoning_gym data is generated")
    if all(known or is_file for known, is_file in zip(generated, files, strict=True)):
        yield from _without_effect(config, "prompt_split", "on files and generated data: only `datasets` has splits")


_ROLLOUT_ONLY = (
    "n_samples_per_prompt advantage_estimator kl_loss_coef kl_loss_type use_unbiased_kl entropy_coef ref_load "
    f"rollout_temperature max_unscored_fraction {' '.join(LOSS_FIELDS)}"
)
_GENERATION = "reward rollout_engine rollout_max_response_len rollout_max_batch_tokens log_num_samples"


def _algorithm(config: Config) -> Iterator[Problem]:
    algorithm = config.algorithm
    if algorithm.algorithm == "sft":
        yield from _without_effect(config, _ROLLOUT_ONLY, "with --algorithm sft: leave it out, or use --algorithm grpo")
        if not is_own_loss(algorithm.loss):
            yield from _without_effect(config, "loss", "with --algorithm sft, which has no advantages: leave it out")
        if not config.evaluates:
            keys = _GENERATION
            if algorithm.loss_aggregation == "fixed_length":  # which divides by the longest response
                keys = keys.replace("rollout_max_response_len ", "")
            reason = "with --algorithm sft that never evaluates: leave it out, or set --eval-interval and --eval-size"
            yield from _without_effect(config, keys, reason)
        return
    if algorithm.n_samples_per_prompt < 2:
        yield (
            f"--n-samples-per-prompt must be at least 2 with --algorithm {algorithm.algorithm}, got "
            f"{algorithm.n_samples_per_prompt}: an advantage compares the samples of one prompt, 8 is usual"
        )
    if not algorithm.kl_loss_coef:
        reason = "without a KL term: set --kl-loss-coef above 0, e.g. 0.001"
        yield from _without_effect(config, "kl_loss_type use_unbiased_kl ref_load", reason)
    if not algorithm.use_opsm:
        yield from _without_effect(config, "opsm_delta", "without --use-opsm")
    if algorithm.mismatch_correction == "none":
        reason = "without a correction: set --mismatch-correction, e.g. tis"
        yield from _without_effect(config, "mismatch_low mismatch_high", reason)
    elif algorithm.use_rollout_logprobs:
        reason = "with --use-rollout-logprobs, where the old logprobs are the engine's: leave one of them out"
        yield from _without_effect(config, "mismatch_correction", reason)


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
    yield from _without_effect(config, unread, f"with --loss {algorithm.loss}, which does not read it: leave it out")
    if config.on_policy and not algorithm.use_rollout_logprobs:
        reason = (
            "when each rollout is one optimizer step, where the policy ratio is always 1: "
            f"set --global-batch-size below {config.samples_per_rollout}, or leave it out"
        )
        yield from _without_effect(config, " ".join(sorted(options.idle_on_policy)), reason)


def _batch(config: Config) -> Iterator[Problem]:
    size, samples = config.batch.global_batch_size, config.samples_per_rollout
    if config.algorithm.algorithm == "sft":
        if size and list(_changed(config, "rollout_batch_size")) and size != config.rollout.batch_size:
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


def _divisor(samples: int, size: int) -> int:
    """The largest divisor of `samples` that is not above `size`."""
    return next(divisor for divisor in range(min(size, samples), 0, -1) if samples % divisor == 0)


def _lengths(config: Config) -> Iterator[Problem]:
    budget, prompt, response = (
        config.batch.max_tokens_per_gpu,
        config.rollout.max_prompt_len,
        config.rollout.max_response_len,
    )
    if config.algorithm.algorithm != "sft" and response >= budget:
        yield (
            f"--rollout-max-response-len {response} leaves no room for a prompt in --max-tokens-per-gpu {budget}: "
            "lower the first or raise the second"
        )
    longest = config.prompt_budget + (response if config.algorithm.algorithm != "sft" else 1)
    if prompt is not None and longest > budget and config.batch.overlong == "error":
        yield (
            f"--rollout-max-prompt-len {prompt} and a response make {longest} tokens, more than --max-tokens-per-gpu "
            f"{budget}: lower the first, raise the second, or use --overlong drop"
        )
    if config.rollout.engine == "vllm":
        yield from _without_effect(
            config, "rollout_max_batch_tokens", "with --rollout-engine vllm, which sizes its own cache"
        )
    elif config.generates and config.rollout.max_batch_tokens < config.prompt_budget + response:
        yield (
            f"--rollout-max-batch-tokens {config.rollout.max_batch_tokens} cannot hold one sequence of "
            f"{config.prompt_budget} prompt and {response} response tokens: raise it"
        )


def _schedule(config: Config) -> Iterator[Problem]:
    optim = config.optim
    if optim.min_lr > optim.lr:
        yield f"--min-lr {optim.min_lr:g} is above --lr {optim.lr:g}: it is where the decay ends"
    if optim.lr_warmup_init > optim.lr:
        yield f"--lr-warmup-init {optim.lr_warmup_init:g} is above --lr {optim.lr:g}: it is where the warm-up begins"
    if optim.lr_warmup_iters and optim.lr_warmup_fraction is not None:
        yield "--lr-warmup-iters and --lr-warmup-fraction are both given: choose one"
    if not optim.lr_warmup_iters and not optim.lr_warmup_fraction:
        reason = "without a warm-up: set --lr-warmup-iters or --lr-warmup-fraction"
        yield from _without_effect(config, "lr_warmup_init", reason)
    if optim.lr_decay_style == "constant":
        reason = "with --lr-decay-style constant: choose linear, cosine, inverse-square-root or WSD"
        yield from _without_effect(config, "min_lr", reason)
        if optim.lr_warmup_fraction is None:
            yield from _without_effect(config, "lr_decay_iters", reason)
    if optim.lr_decay_style != "WSD":
        yield from _without_effect(config, "lr_wsd_decay_iters lr_wsd_decay_style", "without --lr-decay-style WSD")
    yield from _decay_steps(config)


def _decay_steps(config: Config) -> Iterator[Problem]:
    optim = config.optim
    steps = optim.lr_decay_iters or config.total_optimizer_steps
    if optim.lr_decay_style == "constant" or not steps:
        return
    if optim.lr_warmup_iters >= steps:
        yield (
            f"--lr-warmup-iters {optim.lr_warmup_iters} leaves nothing of the {steps} optimizer steps to decay in: "
            "lower it, or use --lr-decay-style constant"
        )
    if optim.lr_decay_style == "WSD" and optim.lr_wsd_decay_iters is None:
        usual = max(1, steps // 10)
        yield f"--lr-decay-style WSD needs --lr-wsd-decay-iters, the length of its final decay, e.g. {usual}"
    if (optim.lr_wsd_decay_iters or 0) > steps:
        yield f"--lr-wsd-decay-iters {optim.lr_wsd_decay_iters} is more than the {steps} optimizer steps: lower it"


def _run(config: Config) -> Iterator[Problem]:
    run = config.run
    if not run.keep_last:
        yield from _without_effect(config, "save_interval", "with --keep-last 0, which writes no checkpoint")
    if not run.eval_interval:
        keys = "eval_prompt_data eval_size n_samples_per_eval_prompt eval_temperature eval_greedy"
        yield from _without_effect(config, keys, "with --eval-interval 0, which never evaluates")
    elif config.data.eval_size == 0:
        keys = "eval_prompt_data eval_interval n_samples_per_eval_prompt eval_temperature eval_greedy"
        yield from _without_effect(config, keys, "with --eval-size 0, which leaves no prompts to evaluate on")


def _log(config: Config) -> Iterator[Problem]:
    others = [name for name in config.log.to if name not in LOGGER_NAMES and ":" not in name]
    known = [*LOGGER_NAMES, *plugin_names("loggers")] if others else []
    for name in others:
        if name not in known:
            takes = f"it takes {', '.join(known)} or package.module:name"
            yield f"--log-to does not know {name!r}{suggest(name, known)} ({takes})"
    if len(set(config.log.to)) < len(config.log.to):
        yield f"--log-to names a logger twice: {', '.join(config.log.to)}"
    if all(name == "console" for name in config.log.to):
        reason = "without a logger that has projects: add e.g. --log-to console trackio"
        yield from _without_effect(config, "log_project log_run_name", reason)


def _launch(config: Config) -> Iterator[Problem]:
    launch = config.launch
    if launch.node_rank >= launch.nnodes:
        yield f"--node-rank {launch.node_rank} must be below --nnodes {launch.nnodes}: machines are counted from 0"
    if launch.nnodes > 1 and launch.rdzv_endpoint is None:
        yield f"--nnodes {launch.nnodes} needs --rdzv-endpoint, the host:port of machine 0, e.g. 10.0.0.1:29500"
    if launch.nnodes == 1:
        yield from _without_effect(config, "rdzv_endpoint", "on one machine: set --nnodes, or leave it out")
    if not launch.dry_run:
        yield from _without_effect(config, "probe", "without --dry-run: a run probes the model itself")
    if launch.rdzv_endpoint is not None and not launch.rdzv_endpoint.rpartition(":")[2].isdigit():
        yield f"--rdzv-endpoint must be host:port, got {launch.rdzv_endpoint!r}, e.g. 10.0.0.1:29500"


_CHECKS: tuple[Callable[[Config], Iterator[Problem]], ...] = (
    _model, _data, _algorithm, _loss, _batch, _lengths, _schedule, _run, _log, _launch,
)  # fmt: skip
