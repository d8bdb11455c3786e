"""Build the components of a run, cheapest to fail first.

Modules that only some runs need (environments, evaluation, SFT) are imported where the configuration turns
them on.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from fsdptrain import platform, registry
from fsdptrain.algo.advantages import AdvantageRule
from fsdptrain.algo.losses import LOSSES
from fsdptrain.config import Config, DataConfig
from fsdptrain.data.prompts import make_prompt
from fsdptrain.data.stream import PromptSource
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import ConfigError, DataError
from fsdptrain.feature import Features, load_features
from fsdptrain.loggers import build_loggers
from fsdptrain.memory.report import MemoryReport
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
from fsdptrain.rewards.build import WeightedSum, build_reward
from fsdptrain.rewards.parallel import ParallelReward, build_parallel
from fsdptrain.rollout import choose_engine, engine_factory
from fsdptrain.rollout.stacks import StackDump
from fsdptrain.rollout.weight_sync.sync import WeightSync
from fsdptrain.rollout.weight_sync.verify import build_verifier
from fsdptrain.trainer.backend import PolicyBackend, build_backend, install_platform_overrides
from fsdptrain.trainer.data import RunData, build_data, require_same_data
from fsdptrain.trainer.rules import advantage_rule
from fsdptrain.trainer.run_dir import RunFolder
from fsdptrain.trainer.samples.background import open_background
from fsdptrain.trainer.samples.build import (
    build_evaluation,
    build_sampler,
    build_source,
    sample_builders,
    supervised_evaluation,
)
from fsdptrain.trainer.samples.source import SampleSource
from fsdptrain.trainer.speed import Speed
from fsdptrain.trainer.tokenizer import load_tokenizer
from fsdptrain.types import Episode

if TYPE_CHECKING:
    from fsdptrain.trainer.evaluation import Evaluation
    from fsdptrain.trainer.samples.environment import LoadedEnvironment
    from fsdptrain.trainer.samples.sft import Builders
    from fsdptrain.trainer.sft_evaluation import LossEvaluation

log = logging.getLogger(__name__)


@runtime_checkable
class Closing(Protocol):
    def close(self) -> None: ...


@dataclass(frozen=True)
class Components:
    """Everything that a run owns."""

    config: Config
    tokenizer: PreTrainedTokenizerBase
    prompts: DataConfig  # how a prompt becomes tokens: system prompt and chat template
    backend: PolicyBackend
    loss: Loss
    advantages: AdvantageRule
    engine: RolloutEngine | None  # None: the run never generates
    weight_sync: WeightSync | None  # None: the run has no engine
    stacks: StackDump | None  # None: the engine has deadlines of its own
    stream: PromptSource
    source: SampleSource
    evaluation: "Evaluation | LossEvaluation | None"
    speed: Speed
    planned_memory: int | None  # bytes per rank on the device; None: no device
    loggers: list[Logger]


@dataclass(frozen=True)
class Inputs:
    """What a run reads before its model is loaded."""

    config: Config  # how prompts are made: with the instructions of the environment
    tokenizer: PreTrainedTokenizerBase
    loss: Loss
    reward: RewardFunction | WeightedSum
    advantages: AdvantageRule
    environment: "LoadedEnvironment | None"
    data: RunData
    builders: "Builders | None"  # of supervised samples
    make_engine: Callable[..., RolloutEngine]


@contextmanager
def build_components(
    config: Config,
    folder: RunFolder,
    *,
    reward: RewardFunction | None,
    dataset: Sequence[Mapping[str, Any]] | None,
    eval_dataset: Sequence[Mapping[str, Any]] | None = None,
) -> Iterator[Components]:
    """Build data and rewards, then the model, then the engine. Close all of them on exit."""
    checkpoint = resolve_checkpoint(config.model.hf_checkpoint)
    install_platform_overrides()  # features compare kernels with the functions that a run uses
    is_embedded = any(section.needs_embedded_engine for section in config.sections)
    engine_name = choose_engine("hf" if is_embedded else config.rollout.engine, device_type=platform.device_type())
    features = load_features(config, checkpoint)
    inputs = read_inputs(config, checkpoint, features, engine_name, reward, dataset, eval_dataset)
    data, tokenizer, environment = inputs.data, inputs.tokenizer, inputs.environment
    require_same_data(data.stream)
    of_losses = supervised_evaluation(inputs.config, tokenizer, data) if data.supervised else None
    generates = bool(data.prompts) or inputs.builders is None
    with ExitStack() as stack:
        rewards = open_rewards(config, inputs.reward, data, environment, stack) if generates else None
        loggers = open_loggers(config, folder, stack)
        memory = MemoryReport(config)
        stack.enter_context(memory.naming_flags())
        backend = open_backend(config, features, memory)
        engine = open_engine(config, backend, inputs.make_engine, checkpoint) if generates else None
        stacks = open_stacks(config, folder, stack)
        sampler = evaluation = weight_sync = background = None
        if engine is not None and rewards is not None:
            is_agent = environment is not None and environment.is_agent
            background = open_background(config, engine, stack, has_deadlines=is_agent)
            stack.callback(engine.close)
            weight_sync = build_weight_sync(config, engine, backend)
            sampler = build_sampler(inputs.config, tokenizer, engine, rewards, environment)
            if isinstance(sampler, Closing):
                stack.callback(sampler.close)
            evaluation = build_evaluation(config, sampler, data.prompts)
        if of_losses is not None:
            evaluation = of_losses(config, backend, generation=evaluation)
        made_by = sampler, inputs.advantages, background
        yield Components(
            config=config,
            tokenizer=tokenizer,
            prompts=data.stream.parts[0].data,
            backend=backend,
            loss=inputs.loss,
            advantages=inputs.advantages,
            engine=engine,
            weight_sync=weight_sync,
            stacks=stacks,
            stream=data.stream,
            source=build_source(inputs.config, data.stream, inputs.builders, *made_by),
            evaluation=evaluation,
            speed=Speed.of(backend.model, platform.local_device(), backend.compute_dtype, copies=config.pack_copies),
            planned_memory=memory.planned,
            loggers=loggers,
        )


def open_stacks(config: Config, folder: RunFolder, stack: ExitStack) -> StackDump | None:
    """Open the file for the stacks of this rank while an engine in this process takes too long. Collective."""
    if config.engine_has_own_devices:
        return None
    with raise_on_all_ranks(ConfigError, f"--output-dir {folder.path} cannot be written: choose another"):
        stacks = StackDump(folder.path / "stacks", dist.get_rank())
    stack.callback(stacks.close)
    return stacks


def read_inputs(
    config: Config,
    checkpoint: Path,
    features: Features,
    engine_name: str,
    reward: RewardFunction | None,
    dataset: Sequence[Mapping[str, Any]] | None,
    eval_dataset: Sequence[Mapping[str, Any]] | None,
) -> Inputs:
    """Load the environment, tokenizer and data, and resolve the functions that the options name. Collective."""
    processor = features.prompt_processor
    environment, config = load_environment(config)
    with raise_on_all_ranks(DataError, "--prompt-data"):
        tokenizer = load_tokenizer(checkpoint, trust_remote_code=config.model.trust_remote_code)
        if processor is not None and processor.chat_template is not None:
            tokenizer.chat_template = processor.chat_template
        config = without_thinking(config, tokenizer)
        loss = registry.resolve(
            config.algorithm.loss, LOSSES, flag="--loss", call=lambda f: f("batch", "logprobs", "config")
        )
        reward_function = reward or build_reward(
            config.reward, prompt_data=config.data.prompt_data, has_environment=environment is not None
        )
        advantages = advantage_rule(config)
        data = build_data(config, tokenizer, dataset, environment, processor, eval_dataset=eval_dataset)
        return Inputs(
            config=config,
            tokenizer=tokenizer,
            loss=loss,
            reward=reward_function,
            advantages=advantages,
            environment=environment,
            data=data,
            builders=sample_builders(config, tokenizer, data) if config.algorithm.algorithm == "sft" else None,
            make_engine=engine_factory(engine_name, device_type=platform.device_type()),
        )


def load_environment(config: Config) -> tuple["LoadedEnvironment | None", Config]:
    """Load --environment, if given. Returns it and the configuration of prompts, with its instructions. Collective."""
    if not config.environment.has_episodes:
        return None, config
    from fsdptrain.trainer.samples.environment import build_environment, with_instructions

    with raise_on_all_ranks(ConfigError, "--environment"):
        environment = build_environment(config.environment)
        assert environment is not None
        return environment, with_instructions(config, environment)


def without_thinking(config: Config, tokenizer: PreTrainedTokenizerBase) -> Config:
    """Turn off the thinking mode of a chat template for the default data, whose answers fit into the default length."""
    data = config.data
    is_default = data.prompt_data == DataConfig().prompt_data and not data.chat_template_kwargs
    if not is_default or not data.apply_chat_template or "enable_thinking" not in str(tokenizer.chat_template):
        return config
    log.info("thinking mode is off for the default data; --chat-template-kwargs enable_thinking=true turns it on")
    return config.model_copy(
        update={"data": data.model_copy(update={"chat_template_kwargs": {"enable_thinking": False}})}
    )


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


def open_backend(config: Config, features: Features, memory: MemoryReport) -> PolicyBackend:
    """Load the policy and log how it is computed. Collective."""
    backend = build_backend(config, features=features, before_load=memory.before_load)
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


def build_weight_sync(config: Config, engine: RolloutEngine, backend: PolicyBackend) -> WeightSync:
    """Connect the backend to the engine."""
    if isinstance(engine, FeatureEngine):
        engine.use_features(backend.features)
    return WeightSync(engine, backend, build_verifier(config, engine))


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
