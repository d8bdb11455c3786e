"""Checks for invalid combinations and for options without effect. Both are errors.

Each check yields one-line problems that name the flags, the values and the fix. The first one is raised.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from fsdptrain.config.algorithm_checks import ALGORITHM_CHECKS
from fsdptrain.config.effects import Problem, without_effect
from fsdptrain.config.megatron_checks import check_megatron, check_megatron_world
from fsdptrain.config.server_checks import SERVER_ENGINE, check_servers
from fsdptrain.errors import ConfigError
from fsdptrain.registry import plugin_names, suggest

if TYPE_CHECKING:
    from fsdptrain.config.root import Config


_DEALT_ATTENTION = ("auto", "varlen", "sdpa")
LOGGER_NAMES = ("console", "wandb", "trackio")


def check(config: Config) -> None:
    """Raise ConfigError for the first problem of the configuration."""
    for find in (*_CHECKS, *_feature_checks()):
        for problem in find(config):
            raise _error(problem)


def _feature_checks() -> Sequence[Callable[[Config], Iterator[Problem]]]:
    """Return the checks of the optional features, if they are installed."""
    if importlib.util.find_spec("fsdptrain.features") is None:
        return ()
    return importlib.import_module("fsdptrain.features.checks").CHECKS


def check_data_options(config: Config) -> None:
    """Raise ConfigError for an option that does not apply to --prompt-data.

    Not part of `check`, because Python callers may pass their own data.
    """
    for problem in _columns(config):
        raise _error(problem)


def check_world_size(config: Config, world_size: int) -> None:
    """Raise ConfigError if the number of processes does not fit. Only known after launch."""
    if config.parallel.backend == "megatron":
        check_megatron_world(config, world_size)
        return
    replicas = config.fsdp.replicate_size
    tensor, expert = config.parallel.tensor_parallel_size, config.parallel.expert_parallel_size
    context = config.parallel.context_parallel_size
    if world_size % replicas:
        raise ConfigError(
            f"--fsdp-replicate-size {replicas} must divide the number of processes, {world_size}: "
            "world size = replicas x shards"
        )
    if world_size // replicas % tensor:
        raise ConfigError(
            f"--tensor-parallel-size {tensor} must divide the processes of a replica, {world_size // replicas}: "
            "world size = replicas x shards x tensor"
        )
    if world_size // replicas % (tensor * context):
        beside = f" x --tensor-parallel-size {tensor}" if tensor > 1 else ""
        raise ConfigError(
            f"--context-parallel-size {context}{beside} must divide the processes of a replica, "
            f"{world_size // replicas}: world size = replicas x shards x context x tensor"
        )
    if world_size // replicas % expert:
        raise ConfigError(
            f"--expert-parallel-size {expert} must divide the processes of a replica, {world_size // replicas}: "
            "experts lie on replicas x expert shards x expert"
        )


def check_processes(config: Config, *, world_size: int, local_world_size: int) -> None:
    """Raise ConfigError if the launched processes do not match the flags."""
    wanted = config.launch.nproc_per_node
    if wanted not in (None, local_world_size):
        raise ConfigError(
            f"--nproc-per-node {wanted} does not fit the {local_world_size} processes that were started on this "
            "machine: leave it out under torchrun"
        )
    if world_size > local_world_size and config.rollout.num_servers is not None:
        raise ConfigError(
            f"--rollout-num-servers {config.rollout.num_servers} starts servers on one machine, and this run has "
            "several: start servers yourself and name them by --rollout-urls"
        )
    check_world_size(config, world_size)


def check_own_launch(config: Config) -> None:
    """Raise NoEffectError for options of the fsdptrain command if torchrun or Python launched the ranks."""
    reason = "where torchrun or Python starts the processes: give it to torchrun, or start with the fsdptrain command"
    for problem in without_effect(config, "max_restarts log_dir", reason):
        raise _error(problem)


def _error(problem: Problem) -> ConfigError:
    return ConfigError(problem) if isinstance(problem, str) else problem


def _model(config: Config) -> Iterator[Problem]:
    if not config.model.hf_checkpoint:
        yield "--hf-checkpoint is missing: the model to train, e.g. --hf-checkpoint Qwen/Qwen3-4B or a local folder"
    if config.model.fp16 and config.model.bf16:
        yield "--fp16 and --bf16 are both on: choose one, e.g. --fp16 --no-bf16"


def _memory(config: Config) -> Iterator[Problem]:
    model = config.model
    if not model.gradient_checkpointing:
        keys = "gradient_checkpointing_kind gradient_checkpointing_every"
        yield from without_effect(config, keys, "without --gradient-checkpointing: add it, or leave this out")
    if model.gradient_checkpointing_kind == "selective":
        way_out = "use --gradient-checkpointing-kind full, or leave it out"
        if model.offload_activations:
            yield f"--offload-activations cannot move what --gradient-checkpointing-kind selective keeps: {way_out}"
        if model.compile:
            yield f"--compile fuses the operations that --gradient-checkpointing-kind selective chooses from: {way_out}"
    if not config.optim.offload_optimizer:
        yield from without_effect(config, "offload_optimizer_step", "without --offload-optimizer: add it")
    elif config.fsdp.cpu_offload:
        reason = "with --fsdp-cpu-offload, which keeps that state in host memory too: leave one of them out"
        yield from without_effect(config, "offload_optimizer", reason)
    if config.fsdp.cpu_offload:
        reason = "with --fsdp-cpu-offload, which keeps weights and optimizer in host memory all the time: leave it out"
        yield from without_effect(config, "offload_train", reason)


def _parallel(config: Config) -> Iterator[Problem]:
    """Reject combinations with tensor and expert parallelism that have not been verified."""
    tensor, expert = config.parallel.tensor_parallel_size > 1, config.parallel.expert_parallel_size > 1
    model = config.model
    beside = {
        "--lora-rank": config.lora.rank > 0,
        "--image-key": config.data.image_key is not None,
        "--compile": model.compile,
        "--gradient-checkpointing-kind selective": model.gradient_checkpointing_kind == "selective",
        "--offload-activations": model.offload_activations,
        "--load-strategy rank0": model.load_strategy == "rank0",
        "--fp16": model.fp16,
        "--fsdp-cpu-offload": config.fsdp.cpu_offload,
        "--async-save": config.run.async_save,
    }
    only_tensor = {
        "--algorithm sft": config.algorithm.algorithm == "sft",
        "--router-replay": config.router.replay != "off",
        "--router-aux-loss-coef": config.router.aux_loss_coef != 0,
        "--rollout-top-p, --rollout-top-k and --rollout-min-p": config.is_truncated,
    }
    for flag, given in (beside | only_tensor).items():
        if given and tensor:
            yield f"--tensor-parallel-size does not work with {flag} yet: leave one of them out"
    for flag, given in beside.items():
        if given and expert:
            yield f"--expert-parallel-size does not work with {flag} yet: leave one of them out"
    yield from _context(config, beside)


def _context(config: Config, beside: Mapping[str, bool]) -> Iterator[Problem]:
    """Check context parallelism. It does not change how parameters are sharded, so only activation options matter."""
    if config.parallel.context_parallel_size == 1:
        reason = "without --context-parallel-size: add it, or leave this out"
        yield from without_effect(config, "context_parallel_recurrent", reason)
        return
    of_activations = ("--image-key", "--compile", "--gradient-checkpointing-kind selective", "--offload-activations")
    for flag in of_activations:
        if beside[flag]:
            yield f"--context-parallel-size does not work with {flag} yet: leave one of them out"
    attention = config.model.attn_implementation
    if attention not in _DEALT_ATTENTION:
        yield (
            f"--context-parallel-size: --attn-implementation {attention} cannot exchange heads: use "
            f"{', '.join(_DEALT_ATTENTION)}"
        )


def _lora(config: Config) -> Iterator[Problem]:
    lora = config.lora
    if not lora.rank:
        keys = "lora_alpha lora_dropout lora_targets lora_export lora_sync"
        yield from without_effect(config, keys, "without an adapter: set --lora-rank, e.g. 32")
        return
    if lora.sync == "adapter" and config.rollout.engine not in ("vllm", SERVER_ENGINE):
        yield (
            f"--lora-sync adapter needs --rollout-engine vllm or {SERVER_ENGINE}, got {config.rollout.engine}: leave "
            "it out, and the adapter is merged into the weights"
        )
    if lora.sync == "adapter" and config.rollout.urls:
        yield (
            "--lora-sync adapter needs servers that the run starts itself, and --rollout-urls names others: use "
            "--rollout-num-servers, or leave it out, and the adapter is merged into the weights"
        )
    if lora.sync == "adapter" and config.rollout.engine == SERVER_ENGINE and config.sync.max_staleness:
        yield (
            "--lora-sync adapter with servers cannot change under requests in flight (--max-staleness): leave one of "
            "the two out"
        )
    if config.algorithm.algorithm != "sft":
        reason = "in reinforcement learning, which trains without dropout: leave it out, or use --algorithm sft"
        yield from without_effect(config, "lora_dropout", reason)
    for name in sorted({name for name in lora.targets if lora.targets.count(name) > 1}):
        yield f"--lora-targets names {name} twice"


def _data(config: Config) -> Iterator[Problem]:
    if not config.data.apply_chat_template:
        yield from without_effect(config, "chat_template_kwargs", "with --no-apply-chat-template: leave it out")


def _vision(config: Config) -> Iterator[Problem]:
    data = config.data
    if data.image_key is None:
        yield from without_effect(config, "train_vision", "without images: set --image-key, the column that holds them")
        return
    if config.lora.rank:
        reason = (
            "with --lora-rank: name layers of the tower by --lora-targets, e.g. all-linear visual.merger.linear_fc1"
        )
        yield from without_effect(config, "train_vision", reason)
    if not data.apply_chat_template:
        yield "--image-key needs --apply-chat-template: only the template knows how a prompt shows an image"
    if config.environment.environment is not None:
        yield (f"--image-key {data.image_key}: environments show no images: leave out --environment or --image-key")
    if config.rollout.engine not in ("auto", "hf"):
        yield (f"--rollout-engine {config.rollout.engine} is given no images: with --image-key use --rollout-engine hf")


def _environment(config: Config) -> Iterator[Problem]:
    if config.environment.environment is None:
        keys = "environment_kwargs max_turns max_observation_len environment_timeout environment_workers"
        yield from without_effect(config, keys, "without an environment: set --environment")
        if config.data.prompt_data == "environment":
            yield "--prompt-data environment are the rows that an environment brings: name it by --environment"
    if config.data.eval_prompt_data == "environment":
        yield "--eval-prompt-data environment: leave it out, its prompts are held out from --prompt-data environment"


def _columns(config: Config) -> Iterator[Problem]:
    """Report options that do not apply to the type of data."""
    names = [name.partition("?")[0] for name in (config.data.prompt_data, config.data.eval_prompt_data) if name]
    generated = [name.startswith("reasoning_gym:") for name in names]
    files = [name.endswith((".jsonl", ".json", ".parquet")) or name == "environment" for name in names]
    if all(known or name == "environment" for known, name in zip(generated, names, strict=True)):
        reason = "with data of reasoning_gym or an environment, which have no columns: leave it out"
        yield from without_effect(config, "input_key label_key image_key metadata_key", reason)
    if not any(generated):
        yield from without_effect(config, "data_size", "on data of a fixed size: only reasoning_gym data is generated")
    if all(known or is_file for known, is_file in zip(generated, files, strict=True)):
        yield from without_effect(config, "prompt_split", "on files and generated data: only `datasets` has splits")


def _lengths(config: Config) -> Iterator[Problem]:
    budget, prompt, response = (
        config.max_tokens_per_pack,
        config.rollout.max_prompt_len,
        config.rollout.max_response_len,
    )
    if config.algorithm.algorithm != "sft" and response >= budget:
        yield (
            f"--rollout-max-response-len {response} leaves no room for a prompt in {config.pack_budget}: "
            "lower the first or raise the second"
        )
    longest = config.prompt_budget + (response if config.algorithm.algorithm != "sft" else 1)
    if prompt is not None and longest > budget and config.batch.overlong == "error":
        yield (
            f"--rollout-max-prompt-len {prompt} and a response make {longest} tokens, more than "
            f"{config.pack_budget}: lower the first, raise the second, or use --overlong drop"
        )
    if config.rollout.engine == "hf":
        reason = "with --rollout-engine hf: leave it out, or use --rollout-engine vllm"
        yield from without_effect(config, "rollout_engine_args rollout_kv_cache_gib rollout_timeout", reason)
    if config.rollout.engine in ("vllm", SERVER_ENGINE):
        reason = f"with --rollout-engine {config.rollout.engine}, which sizes its own cache"
        yield from without_effect(config, "rollout_max_batch_tokens", reason)
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
        yield from without_effect(config, "lr_warmup_init", reason)
    if optim.lr_decay_style == "constant":
        reason = "with --lr-decay-style constant: choose linear, cosine, inverse-square-root or WSD"
        yield from without_effect(config, "min_lr", reason)
        if optim.lr_warmup_fraction is None:
            yield from without_effect(config, "lr_decay_iters", reason)
    if optim.lr_decay_style != "WSD":
        yield from without_effect(config, "lr_wsd_decay_iters lr_wsd_decay_style", "without --lr-decay-style WSD")
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
        yield from without_effect(config, "save_interval async_save", "with --keep-last 0, which writes no checkpoint")
    if not run.save_interval:
        reason = "with --save-interval 0: the only checkpoint is written after the last step"
        yield from without_effect(config, "async_save", reason)
    if not run.eval_interval:
        keys = "eval_prompt_data eval_size n_samples_per_eval_prompt eval_temperature eval_greedy"
        yield from without_effect(config, keys, "with --eval-interval 0, which never evaluates")
    elif config.data.eval_size == 0:
        keys = "eval_prompt_data eval_interval n_samples_per_eval_prompt eval_temperature eval_greedy"
        yield from without_effect(config, keys, "with --eval-size 0, which leaves no prompts to evaluate on")


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
        yield from without_effect(config, "log_project log_run_name", reason)


def _launch(config: Config) -> Iterator[Problem]:
    launch = config.launch
    longest = 3 * (config.reward.reward_timeout or 0)  # the run ends after three timeouts in a row
    if longest > config.reward_patience:
        ahead = config.sync.max_staleness
        beside = f", for each of {1 + ahead} rollouts (--max-staleness {ahead})" if ahead else ""
        yield (
            f"--dist-timeout {launch.dist_timeout} is too short for a --reward that hangs: half of it{beside} is "
            f"{config.reward_patience:g} s, and 3 x --reward-timeout is {longest:g} s: raise it, or lower "
            "--reward-timeout"
        )
    if launch.max_restarts and not (config.run.save_interval and config.run.keep_last):
        yield "--max-restarts needs checkpoints to go on from: --save-interval and --keep-last above 0"
    if not launch.dry_run:
        yield from without_effect(config, "probe", "without --dry-run: a run probes the model itself")


_CHECKS: tuple[Callable[[Config], Iterator[Problem]], ...] = (
    _model, check_megatron, _memory, _parallel, _lora, _data, _vision, _environment, *ALGORITHM_CHECKS, _lengths,
    check_servers, _schedule, _run, _log, _launch,
)  # fmt: skip
