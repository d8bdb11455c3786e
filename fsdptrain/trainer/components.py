"""Build the components of a run, cheapest to fail first."""

import importlib.util
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from fsdptrain import platform, registry
from fsdptrain.algo.advantages import AdvantageRule
from fsdptrain.algo.corrections import CORRECTIONS
from fsdptrain.algo.losses import LOSSES
from fsdptrain.config import Config
from fsdptrain.config.algorithm import AlgorithmConfig, SelectionConfig
from fsdptrain.data.chat import TurnRenderer
from fsdptrain.data.curriculum import PassRates
from fsdptrain.data.prompts import PromptStream, make_prompts
from fsdptrain.data.sources import Row, Rows, as_rows, content_hash, environment_rows, load_rows, split_rows
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import CheckpointError, ConfigError, DataError, MemoryPlanError
from fsdptrain.feature import Features, check_features, load_features
from fsdptrain.loggers import build_loggers
from fsdptrain.memory.demand import MemorySupply, check_load_memory, demand_of, load_memory_line
from fsdptrain.memory.pieces import Grid, Pieces
from fsdptrain.model.loading.meta import resolve_checkpoint
from fsdptrain.model.probes.kernels import require_no_fallback
from fsdptrain.model.structure import count_parameters
from fsdptrain.protocols import (
    FeatureEngine,
    InFlightEngine,
    Logger,
    Loss,
    PromptProcessor,
    RewardFunction,
    RolloutEngine,
)
from fsdptrain.rewards import build_reward, reads_environment
from fsdptrain.rollout import engine_factory
from fsdptrain.rollout.embedded.replica import max_positions
from fsdptrain.rollout.weight_sync.sync import WeightSync
from fsdptrain.rollout.weight_sync.verify import build_verifier
from fsdptrain.trainer.backend import PolicyBackend, build_backend
from fsdptrain.trainer.evaluation import Evaluation
from fsdptrain.trainer.rules import advantage_rule, selection_rules, shaping_rule
from fsdptrain.trainer.run_dir import RunFolder
from fsdptrain.trainer.samples.deadline import WithDeadline
from fsdptrain.trainer.samples.environment import LoadedEnvironment, build_environment
from fsdptrain.trainer.samples.multi_turn import MultiTurn
from fsdptrain.trainer.samples.single_turn import RolloutSource, Sampler, SampleSource, SftSource, SingleTurn, own_share
from fsdptrain.trainer.samples.threads import StepThreads
from fsdptrain.trainer.speed import Speed
from fsdptrain.trainer.timeline import Timeline
from fsdptrain.trainer.waits import Waits, watched_waits
from fsdptrain.types import LossConfig, Prompt, SamplingParams

log = logging.getLogger(__name__)

DEFAULT_EVAL_SIZE = 128  # prompts
ENVIRONMENT_DATA = "environment"  # value of --prompt-data: the environment supplies the data


@dataclass(frozen=True)
class Components:
    """Everything that a run owns."""

    backend: PolicyBackend
    loss: Loss
    advantages: AdvantageRule
    engine: RolloutEngine | None  # None: the run never generates
    weight_sync: WeightSync | None  # None: the run has no engine
    waits: Waits
    stream: PromptStream
    source: SampleSource
    timeline: Timeline
    evaluation: Evaluation | None
    speed: Speed
    planned_memory: int | None  # bytes per rank on the device; None: no device, or no plan is possible
    loggers: list[Logger]


@contextmanager
def build_components(
    config: Config, folder: RunFolder, *, reward: RewardFunction | None, dataset: Sequence[Mapping[str, Any]] | None
) -> Iterator[Components]:
    """Build data and rewards, then the model, then the engine. Close all of them on exit."""
    check_features(config)
    checkpoint = resolve_checkpoint(config.model.hf_checkpoint)
    features = load_features(config, checkpoint)
    processor = features.prompt_processor
    with raise_on_all_ranks(ConfigError, "--environment"):
        environment = build_environment(config.environment)
        told = _with_instructions(config, environment)
    with raise_on_all_ranks(DataError, "--prompt-data"):
        tokenizer = load_tokenizer(checkpoint, trust_remote_code=config.model.trust_remote_code)
        loss = registry.resolve(config.algorithm.loss, LOSSES, flag="--loss")
        score = reward or build_reward(
            config.reward, prompt_data=config.data.prompt_data, has_environment=environment is not None
        )
        advantages = advantage_rule(config, score)
        if processor is not None and processor.chat_template is not None:
            tokenizer.chat_template = processor.chat_template
        stream, held_out = build_data(told, tokenizer, dataset, environment, processor)
        engine_name = config.rollout.engine if processor is None else "hf"  # only the hf engine accepts images
        make_engine = engine_factory(engine_name, device_type=platform.device_type())
    generates = bool(held_out) or config.algorithm.algorithm != "sft"
    has_servers = config.engine_has_own_devices
    device = platform.local_device()
    plans = platform.has_accelerator() and config.model.backend == "fsdp"
    with ExitStack() as stack:
        loggers = open_loggers(config, folder, stack)
        backend = build_backend(
            config,
            before_load=lambda model: plan_memory(model, config, embedded_engine=generates and not has_servers),
            features=features,
        )
        for line in backend.lines:
            log.info("%s", line)
        report_fallbacks(backend, strict=config.model.strict)
        if config.sync.offload_train and not platform.has_accelerator():
            log.warning("--offload-train: there is no GPU; copies are made, and no memory is saved")
        engine = make_engine(config, checkpoint=checkpoint, device=device) if generates else None
        sampler = evaluation = weight_sync = background = None
        timeline, waits = Timeline(), watched_waits(config, folder, stack)
        if engine is not None:
            background = rollout_threads(config, engine, stack)
            stack.callback(engine.close)
            with raise_on_all_ranks(ConfigError, "--verify-weight-sync"):
                positions = max_positions(backend.model)
                verifier = build_verifier(config, engine, backend, tokenizer, max_positions=positions)
            if isinstance(engine, FeatureEngine):
                engine.use_features(features)
            weight_sync = WeightSync(engine, backend, verifier)
            timed = WithDeadline(score, config.reward.reward_timeout, patience=config.reward_patience)
            reads = environment is not None and reads_environment(score)
            sampler = build_sampler(
                told, tokenizer, engine=engine, reward=timed, environment=environment, reads_environment=reads
            )
            if held_out:
                evaluation = Evaluation(config, sampler, own_share(held_out))
        yield Components(
            backend=backend,
            loss=loss,
            advantages=advantages,
            engine=engine,
            weight_sync=weight_sync,
            waits=waits,
            stream=stream,
            source=build_source(told, stream, tokenizer, sampler, advantages, timeline, background, features),
            timeline=timeline,
            evaluation=evaluation,
            speed=Speed.of(backend.model, device, backend.compute_dtype, copies=config.pack_copies),
            planned_memory=planned_memory(backend.model, config) if plans else None,
            loggers=loggers,
        )


def rollout_threads(config: Config, engine: RolloutEngine, stack: ExitStack) -> Executor | None:
    """Create one thread per rollout in flight, ended after the engine. None: rollouts run on the training thread."""
    ahead = config.sync.max_staleness
    if not ahead or not isinstance(engine, InFlightEngine):
        return None
    threads = ThreadPoolExecutor(1 + ahead, thread_name_prefix="rollout")
    stack.callback(threads.shutdown, wait=False, cancel_futures=True)  # do not wait: other ranks wait for an error
    return threads


def report_fallbacks(backend: PolicyBackend, *, strict: bool) -> None:
    """Log one warning per fallback kernel. With --strict, raise ConfigError on all ranks instead. Collective."""
    found = backend.kernels()
    for kernel in found:
        if kernel.fell_back and not strict and dist.get_rank() == 0:
            log.warning("fallback: %s", kernel.line)
    with raise_on_all_ranks(ConfigError, "--strict"):
        if strict:
            require_no_fallback(found)


def open_loggers(config: Config, folder: RunFolder, stack: ExitStack) -> list[Logger]:
    """Open the loggers of rank 0; `stack` closes them. If one fails, all ranks raise the error. Collective."""
    with raise_on_all_ranks(ConfigError, "--log-to"):
        loggers = build_loggers(
            config.log,
            folder.path,
            total_steps=config.run.num_rollout,
            resumed_step=folder.resumed_step,
            config=config,
        )
    for logger in loggers:
        stack.callback(logger.close)
    return loggers


def plan_memory(model: PreTrainedModel, config: Config, *, embedded_engine: bool) -> None:
    """Log required and available memory. Raises MemoryPlanError on all ranks if loading cannot fit. Collective."""
    pieces = Pieces(model, Grid.of(config, dist.get_world_size()))
    demand = demand_of(config, pieces, count_parameters(model), embedded_engine=embedded_engine)
    supply = MemorySupply(
        device_free=platform.device_memory()[0],
        host_free=platform.host_memory()[0],
        ranks_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        has_accelerator=platform.has_accelerator(),
    )
    log.info("%s", load_memory_line(demand, supply))
    with raise_on_all_ranks(MemoryPlanError, "--hf-checkpoint"):
        check_load_memory(demand, supply)


def planned_memory(model: PreTrainedModel, config: Config) -> int | None:
    """Compute the peak memory of the memory plan without its margin. None if it cannot be planned. [bytes]"""
    if importlib.util.find_spec("fsdptrain.tools") is None:
        return None
    tools = importlib.import_module("fsdptrain.tools.plan.plan")
    planner = tools.Planner(model, tools.Machine(dist.get_world_size(), platform.device_memory()[1]))
    try:
        moments = [planner.training(config), planner.generation(config)]
    except MemoryPlanError as error:
        log.info("%s", error)
        return None
    return max(moment.total for moment in moments if moment is not None)


def load_tokenizer(checkpoint: Path, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Load the tokenizer. CheckpointError if there is none: transformers would create an empty one by model type."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"--hf-checkpoint {checkpoint} has no tokenizer that can be loaded: {error}") from error
    if not tokenizer("a", add_special_tokens=False)["input_ids"]:
        raise CheckpointError(
            f"--hf-checkpoint {checkpoint} has no tokenizer with a vocabulary: is tokenizer.json missing?"
        )
    return tokenizer


def _with_instructions(config: Config, environment: LoadedEnvironment | None) -> Config:
    """Add the environment's tools, and its system prompt unless the user set one, to the data section."""
    if environment is None:
        return config
    changes: dict[str, Any] = {}
    if environment.system_prompt is not None and config.data.system_prompt == "auto":
        changes["system_prompt"] = environment.system_prompt
    if environment.tools:
        changes["chat_template_kwargs"] = {**config.data.chat_template_kwargs, "tools": list(environment.tools)}
    return config.model_copy(update={"data": config.data.model_copy(update=changes)})


def build_data(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Sequence[Mapping[str, Any]] | None,
    environment: LoadedEnvironment | None,
    processor: PromptProcessor | None = None,
) -> tuple[PromptStream, list[Prompt]]:
    """Build the stream of training prompts and the held-out prompts (none if the run never evaluates)."""
    data, image_key = config.data, None if processor is None else processor.image_key
    rows = _rows(config, environment, image_key) if dataset is None else as_rows(dataset, data, image_key=image_key)
    held_out: list[Row] = []
    if config.evaluates and data.eval_prompt_data is not None:
        source = data.model_copy(update={"prompt_data": data.eval_prompt_data})
        other = load_rows(source, seed=config.run.seed, flag="--eval-prompt-data", image_key=image_key)
        held_out = [other[i] for i in range(min(len(other), data.eval_size or DEFAULT_EVAL_SIZE))]
    elif config.evaluates:
        size = min(DEFAULT_EVAL_SIZE, len(rows) // 10) if data.eval_size is None else data.eval_size
        rows, held_out = split_rows(rows, size, config.run.seed)
    exclude = {content_hash(row) for row in held_out}
    budget = config.prompt_budget
    stream = PromptStream(
        rows,
        tokenizer,
        data=data,
        rollout=config.rollout,
        exclude=exclude,
        max_prompt_len=budget,
        curriculum=build_curriculum(config.selection, num_rows=len(rows)),
        processor=processor,
    )
    prompts = make_prompts(held_out, tokenizer, data=data, max_prompt_len=budget, processor=processor)
    if config.evaluates and not held_out:
        log.warning("nothing is evaluated: %d rows are too few to hold out a tenth of; set --eval-size", len(rows))
    elif len(prompts) < len(held_out):
        line = "evaluations leave out %d of %d prompts, which are longer than %d tokens"
        log.warning(line, len(held_out) - len(prompts), len(held_out), budget)
    return stream, prompts


def build_curriculum(selection: SelectionConfig, *, num_rows: int) -> PassRates | None:
    if selection.curriculum == "none":
        return None
    return PassRates(num_rows, floor=selection.curriculum_floor, decay=selection.curriculum_decay)


def _rows(config: Config, environment: LoadedEnvironment | None, image_key: str | None) -> Rows:
    if config.data.prompt_data != ENVIRONMENT_DATA:
        return load_rows(config.data, seed=config.run.seed, image_key=image_key)
    if environment is None or environment.dataset is None:
        name = config.environment.environment
        raise DataError(
            f"--prompt-data {ENVIRONMENT_DATA}: --environment {name} has no method dataset; name data of your own"
        )
    return environment_rows(environment.dataset())


def build_sampler(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    *,
    engine: RolloutEngine,
    reward: RewardFunction,
    environment: LoadedEnvironment | None,
    reads_environment: bool,
) -> Sampler:
    if environment is None:
        return SingleTurn(engine, reward, tokenizer)
    return MultiTurn(
        engine=engine,
        environment=environment,
        reward=reward,
        reads_environment=reads_environment,
        renderer=TurnRenderer(tokenizer, data=config.data, max_observation_len=config.environment.max_observation_len),
        threads=StepThreads(
            num_threads=config.environment.environment_workers, timeout=config.environment.environment_timeout
        ),
        tokenizer=tokenizer,
        max_turns=config.environment.max_turns,
    )


def build_source(
    config: Config,
    stream: PromptStream,
    tokenizer: PreTrainedTokenizerBase,
    sampler: Sampler | None,
    advantages: AdvantageRule,
    timeline: Timeline,
    background: Executor | None,
    features: Features,
) -> SampleSource:
    if config.algorithm.algorithm == "sft" or sampler is None:
        renderer = TurnRenderer(tokenizer, data=config.data)
        return SftSource(stream, tokenizer, renderer, num_prompts=config.samples_per_rollout)
    return RolloutSource(
        stream=stream,
        sampler=sampler,
        sampling=features.sampling(
            SamplingParams(
                num_samples=config.algorithm.n_samples_per_prompt,
                max_tokens=config.rollout.max_response_len,
                temperature=config.rollout.temperature,
                top_p=config.rollout.top_p,
                top_k=config.rollout.top_k or -1,
                min_p=config.rollout.min_p,
                seed=config.rollout.seed,
            )
        ),
        features=features,
        num_prompts=config.rollout.batch_size,
        num_shown=config.log.num_samples,
        shaping=shaping_rule(config),
        advantages=advantages,
        max_unscored_fraction=config.reward.max_unscored_fraction,
        rules=selection_rules(config, advantages),
        max_staleness=config.sync.max_staleness,
        num_rollouts=config.run.num_rollout,
        background=background,
        timeline=timeline,
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
        ipo_kl_coef=algorithm.ipo_kl_coef,
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
