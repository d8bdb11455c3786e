"""Build the components of a run, cheapest to fail first.

Modules that only some runs need (environments, evaluation, SFT) are imported where the configuration turns
them on.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from fsdptrain import platform, registry
from fsdptrain.algo.advantages import AdvantageRule
from fsdptrain.algo.losses import LOSSES
from fsdptrain.config import Config
from fsdptrain.config.checks import is_valid
from fsdptrain.data.prompts import make_prompt
from fsdptrain.data.stream import PromptSource
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import ConfigError, DataError
from fsdptrain.feature import Features, check_features, load_features
from fsdptrain.loggers import build_loggers
from fsdptrain.model.loading.meta import resolve_checkpoint
from fsdptrain.model.probes.kernels import require_no_fallback
from fsdptrain.protocols import (
    FeatureEngine,
    Logger,
    Loss,
    OffloadingBackend,
    RewardFunction,
    RolloutEngine,
)
from fsdptrain.rewards.build import WeightedSum, build_reward, reads_environment
from fsdptrain.rewards.parallel import ParallelReward, build_parallel
from fsdptrain.rollout import engine_factory
from fsdptrain.rollout.embedded.replica import max_positions
from fsdptrain.rollout.weight_sync.sync import WeightSync
from fsdptrain.rollout.weight_sync.verify import build_verifier
from fsdptrain.trainer.backend import PolicyBackend, build_backend, install_platform_overrides
from fsdptrain.trainer.data import RunData, build_data, require_same_data
from fsdptrain.trainer.memory import build_planner, choose_sizes, plan_memory, planned_memory
from fsdptrain.trainer.rules import advantage_rule, selection_rules, shaping_rule
from fsdptrain.trainer.run_dir import RunFolder
from fsdptrain.trainer.samples.background import Background, open_background
from fsdptrain.trainer.samples.single_turn import Sampler, SingleTurn
from fsdptrain.trainer.samples.source import RolloutSource, SampleSource, own_share
from fsdptrain.trainer.speed import Speed
from fsdptrain.trainer.timeline import Timeline
from fsdptrain.trainer.tokenizer import load_tokenizer
from fsdptrain.trainer.waits import Waits, watched_waits
from fsdptrain.types import Episode, Prompt, SamplingParams

if TYPE_CHECKING:
    from fsdptrain.trainer.evaluation import Evaluation
    from fsdptrain.trainer.samples.environment import LoadedEnvironment
    from fsdptrain.trainer.samples.sft import Builders
    from fsdptrain.trainer.sft_evaluation import LossEvaluation

log = logging.getLogger(__name__)

# imported when a run has an agent
AGENT_SAMPLER = registry.Table[Callable[..., Sampler]]({"agent": "fsdptrain.agents.sampler:build_agent_sampler"})


@runtime_checkable
class Closing(Protocol):
    def close(self) -> None: ...


@dataclass(frozen=True)
class Components:
    """Everything that a run owns."""

    config: Config  # without what this machine cannot run, and with the chosen sizes
    backend: PolicyBackend
    loss: Loss
    advantages: AdvantageRule
    engine: RolloutEngine | None  # None: the run never generates
    weight_sync: WeightSync | None  # None: the run has no engine
    waits: Waits
    tokenizer: PreTrainedTokenizerBase
    stream: PromptSource
    source: SampleSource
    timeline: Timeline
    evaluation: "Evaluation | LossEvaluation | None"
    speed: Speed
    planned_memory: int | None  # bytes per rank on the device; None: no device, or no plan is possible
    loggers: list[Logger]


@contextmanager
def build_components(
    config: Config, folder: RunFolder, *, reward: RewardFunction | None, dataset: Sequence[Mapping[str, Any]] | None
) -> Iterator[Components]:
    """Build data and rewards, then the model, then the engine. Close all of them on exit."""
    config = usable_here(config)
    checkpoint = resolve_checkpoint(config.model.hf_checkpoint)
    install_platform_overrides()  # features compare kernels with the functions that a run uses
    features = load_features(config, checkpoint)
    processor = features.prompt_processor
    environment, instructed = load_environment(config)
    is_sft = config.algorithm.algorithm == "sft"
    with raise_on_all_ranks(DataError, "--prompt-data"):
        tokenizer = load_tokenizer(checkpoint, trust_remote_code=config.model.trust_remote_code)
        if processor is not None and processor.chat_template is not None:
            tokenizer.chat_template = processor.chat_template
        loss = registry.resolve(
            config.algorithm.loss, LOSSES, flag="--loss", call=lambda f: f("batch", "logprobs", "config")
        )
        reward_function = reward or build_reward(
            config.reward, prompt_data=config.data.prompt_data, has_environment=environment is not None
        )
        advantages = advantage_rule(config, reward_function)
        data = build_data(instructed, tokenizer, dataset, environment, processor)
        builders = sample_builders(instructed, tokenizer, data) if is_sft else None
        engine_name = config.rollout.engine if processor is None else "hf"  # only the hf engine accepts images
        make_engine = engine_factory(engine_name, device_type=platform.device_type())
    require_same_data(data.stream)
    of_losses = supervised_evaluation(instructed, tokenizer, data) if data.supervised else None
    generates = bool(data.prompts) or not is_sft
    device = platform.local_device()
    plans = platform.has_accelerator() and config.model.backend == "fsdp"
    # not the name in the hub: ranks would look it up once more, each alone
    planner = build_planner(config.with_values(hf_checkpoint=str(checkpoint))) if plans else None
    config = choose_sizes(planner, config)
    with ExitStack() as stack:
        rewards = open_rewards(config, reward_function, data, environment, stack) if generates else None
        loggers = open_loggers(config, folder, stack)
        backend = open_backend(config, features)
        engine = open_engine(config, backend, make_engine, checkpoint) if generates else None
        timeline, waits = Timeline(), watched_waits(config, folder, stack)
        sampler = evaluation = weight_sync = background = None
        if engine is not None and rewards is not None:
            is_agent = environment is not None and environment.is_agent
            background = open_background(config, engine, stack, has_deadlines=is_agent)
            stack.callback(engine.close)
            weight_sync = build_weight_sync(config, engine, backend, tokenizer)
            sampler = build_sampler(instructed, tokenizer, engine, rewards, environment)
            if isinstance(sampler, Closing):
                stack.callback(sampler.close)
            evaluation = build_evaluation(config, sampler, data.prompts)
        if of_losses is not None:
            evaluation = of_losses(config, backend, generation=evaluation)
        yield Components(
            config=config,
            backend=backend,
            loss=loss,
            advantages=advantages,
            engine=engine,
            weight_sync=weight_sync,
            waits=waits,
            tokenizer=tokenizer,
            stream=data.stream,
            source=build_source(instructed, data.stream, builders, sampler, advantages, timeline, background, features),
            timeline=timeline,
            evaluation=evaluation,
            speed=Speed.of(backend.model, device, backend.compute_dtype, copies=config.pack_copies),
            planned_memory=planned_memory(planner, config),
            loggers=loggers,
        )


def usable_here(config: Config) -> Config:
    """Call `check_features`, without what --speed fast has turned on and this machine cannot run. Collective."""
    try:
        check_features(config)
    except ConfigError as error:
        plain = config.without_fast(("compile", "activation_memory_budget"), str(error))
        if plain.speed_line == config.speed_line or not is_valid(plain):  # an option that is set needs it
            raise
        check_features(plain)
        config = plain
    if config.speed_line:
        log.info("%s", config.speed_line)
    return config


def load_environment(config: Config) -> tuple["LoadedEnvironment | None", Config]:
    """Load --environment, if given. Returns it and the configuration of prompts, with its instructions. Collective."""
    if not config.environment.has_episodes:
        return None, config
    from fsdptrain.trainer.samples.environment import build_environment, with_instructions

    with raise_on_all_ranks(ConfigError, "--environment"):
        environment = build_environment(config.environment)
        assert environment is not None
        return environment, with_instructions(config, environment)


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


def open_backend(config: Config, features: Features) -> PolicyBackend:
    """Load the policy and log how it is computed. Collective."""
    backend = build_backend(config, features=features, before_load=lambda model: plan_memory(model, config))
    for line in backend.lines:
        log.info("%s", line)
    report_fallbacks(backend, strict=config.model.strict)
    why = config.trains_zero_advantage
    if config.algorithm.skip_zero_advantage and config.algorithm.algorithm != "sft" and why:
        log.info("samples with advantage 0 are not skipped: %s", why)
    if config.sync.offload_train and not platform.has_accelerator():
        log.warning("--offload-train: no GPU; this copies weights and saves no memory")
    return backend


def open_engine(
    config: Config, backend: PolicyBackend, make: Callable[..., RolloutEngine], checkpoint: Path
) -> RolloutEngine:
    """Build the engine. With --offload-train the device holds only the trainer's weights then, as in a weight sync."""
    if not config.sync.offload_train:
        return make(config, checkpoint=checkpoint, device=platform.local_device())
    assert isinstance(backend, OffloadingBackend), "the configuration refuses other backends"
    backend.offload(keep_weights=True)
    engine = make(config, checkpoint=checkpoint, device=platform.local_device())
    engine.sleep()
    backend.onload()
    return engine


def report_fallbacks(backend: PolicyBackend, *, strict: bool) -> None:
    """Log one warning per fallback kernel. With --strict, raise ConfigError on all ranks instead. Collective."""
    found = backend.kernels()
    for kernel in found:
        if kernel.fell_back and not strict and dist.get_rank() == 0:
            log.warning("fallback: %s", kernel.line)
    with raise_on_all_ranks(ConfigError, "--strict"):
        if strict:
            require_no_fallback(found)


def build_weight_sync(
    config: Config, engine: RolloutEngine, backend: PolicyBackend, tokenizer: PreTrainedTokenizerBase
) -> WeightSync:
    """Connect the backend to the engine. Raises ConfigError on all ranks if the engine cannot be verified."""
    with raise_on_all_ranks(ConfigError, "--verify-weight-sync"):
        positions = max_positions(backend.model)
        verifier = build_verifier(config, engine, backend, tokenizer, max_positions=positions)
    if isinstance(engine, FeatureEngine):
        engine.use_features(backend.features)
    return WeightSync(engine, backend, verifier)


def open_rewards(
    config: Config,
    reward: RewardFunction | WeightedSum,
    data: RunData,
    environment: "LoadedEnvironment | None",
    stack: ExitStack,
) -> ParallelReward:
    """Start the rewards. Rank 0 calls those of the user once. Raises ConfigError on all ranks. Collective."""
    with raise_on_all_ranks(ConfigError, "--reward"):
        rewards = build_parallel(config, reward)
        stack.callback(rewards.close)
        prompts = [*data.prompts[:1]]
        if config.algorithm.algorithm != "sft":  # else only evaluations compute rewards
            part = data.stream.parts[0]
            prompts.insert(0, make_prompt(part.first_row(), part.tokenizer, data=part.data, processor=part.processor))
        if environment is not None:
            episode = Episode((), None, done=True)
            prompts = [replace(prompt, metadata={**prompt.metadata, "episode": episode}) for prompt in prompts]
        lines = rewards.check(prompts, call=dist.get_rank() == 0)
    for line in lines:
        log.warning("%s", line)
    return rewards


def build_sampler(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    engine: RolloutEngine,
    reward: ParallelReward,
    environment: "LoadedEnvironment | None",
) -> Sampler:
    """Build the sampler of single responses, or of episodes."""
    if environment is None:
        return SingleTurn(engine, reward, tokenizer)
    from fsdptrain.trainer.samples.environment import Agent

    if isinstance(environment.environment, Agent):
        with raise_on_all_ranks(ConfigError, "--environment"):
            return AGENT_SAMPLER["agent"](
                config,
                tokenizer,
                engine=engine,
                reward=reward,
                agent=environment.environment,
                reads_environment=reads_environment(reward.reward),
            )
    from fsdptrain.trainer.samples.multi_turn import build_multi_turn

    return build_multi_turn(
        config,
        tokenizer,
        engine=engine,
        reward=reward,
        environment=environment,
        reads_environment=reads_environment(reward.reward),
    )


def build_evaluation(config: Config, sampler: Sampler, held_out: Sequence[Prompt]) -> "Evaluation | None":
    if not held_out:
        return None
    from fsdptrain.trainer.evaluation import Evaluation

    return Evaluation(config, sampler, own_share(held_out))


def sample_builders(config: Config, tokenizer: PreTrainedTokenizerBase, data: RunData) -> "Builders":
    """Return the builders of supervised samples. Raises DataError if they can use none of the first rows."""
    from fsdptrain.data.sft import SampleBuilder
    from fsdptrain.trainer.samples.sft import check_first_rows

    builders = {
        name: SampleBuilder.of(config, part.data, tokenizer)
        for name, part in zip(config.data.sources, data.stream.parts, strict=True)
    }
    if config.run.num_rollout:
        for part, builder in zip(data.stream.parts, builders.values(), strict=True):
            check_first_rows(part, builder)
    return builders


def supervised_evaluation(
    config: Config, tokenizer: PreTrainedTokenizerBase, data: RunData
) -> "Callable[..., LossEvaluation]":
    """Build the held-out samples. Returns the function that builds their evaluation. Collective."""
    from fsdptrain.trainer.sft_evaluation import LossEvaluation, held_out_samples

    return partial(LossEvaluation.of, data=data, samples=held_out_samples(config, tokenizer, data))


def build_source(
    config: Config,
    stream: PromptSource,
    builders: "Builders | None",
    sampler: Sampler | None,
    advantages: AdvantageRule,
    timeline: Timeline,
    background: Background | None,
    features: Features,
) -> SampleSource:
    if builders is not None:
        from fsdptrain.trainer.samples.sft import SftSource

        return SftSource.of(config, stream, builders)
    assert sampler is not None, "reinforcement learning has an engine"
    sampling = SamplingParams(
        num_samples=config.algorithm.n_samples_per_prompt,
        max_tokens=config.rollout.max_response_len,
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        top_k=config.rollout.top_k or -1,
        min_p=config.rollout.min_p,
        seed=config.rollout.seed,
    )
    values: dict[str, Any] = {
        "stream": stream,
        "sampler": features.wrap_sampler(sampler),
        "sampling": features.sampling(sampling),
        "features": features,
        "num_prompts": config.rollout.batch_size,
        "num_shown": config.log.num_samples,
        "shaping": shaping_rule(config),
        "advantages": advantages,
        "max_unscored_fraction": config.reward.max_unscored_fraction,
        "rules": selection_rules(config, advantages),
        "max_staleness": config.sync.max_staleness,
        "num_rollouts": config.run.num_rollout,
        "timeline": timeline,
    }
    if background is None:
        return RolloutSource(**values)
    from fsdptrain.trainer.samples.continuous import ContinuousSource

    return ContinuousSource(
        **values, **vars(background), partial=config.sync.partial_rollout, timeout=config.launch.dist_timeout
    )
