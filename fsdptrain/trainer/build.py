"""Build a run in the order of a step, cheapest to fail first.

Modules that only some runs need (environments, evaluation, SFT) are imported where the configuration turns
them on.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from fsdptrain import platform, registry
from fsdptrain.algo.advantages import AdvantageRule
from fsdptrain.algo.losses import LOSSES
from fsdptrain.config import Config
from fsdptrain.config.checks import check_packages
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.enabled_features import Features, load_features
from fsdptrain.errors import ConfigError, DataError
from fsdptrain.loggers import build_loggers
from fsdptrain.model.loading.meta import resolve_checkpoint
from fsdptrain.rewards.build import WeightedSum, build_reward
from fsdptrain.rewards.parallel import ParallelReward
from fsdptrain.rollout import engine_factory
from fsdptrain.rollout.weight_sync.sync import WeightSync, build_verifier
from fsdptrain.stages import stage
from fsdptrain.trainer.backend import open_backend
from fsdptrain.trainer.data import RunData, build_data, require_same_data
from fsdptrain.trainer.loop import TrainingLoop
from fsdptrain.trainer.phases import Phases
from fsdptrain.trainer.reporting import Reporter
from fsdptrain.trainer.resolve import load_environment, open_tokenizer, resolve, resolve_dtype
from fsdptrain.trainer.run_dir import RunFolder, open_folder
from fsdptrain.trainer.samples.build import AGENT_SAMPLER, advantage_rule, build_sampler, build_source, open_rewards
from fsdptrain.trainer.samples.source import own_share
from fsdptrain.trainer.stopping import StopRequest
from fsdptrain.types import Sample

if TYPE_CHECKING:
    from fsdptrain.data.sft import SampleBuilder
    from fsdptrain.protocols import Logger, Loss, RolloutEngine, TrainBackend
    from fsdptrain.trainer.samples.environment import LoadedEnvironment
    from fsdptrain.trainer.trainer import Trainer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """What a run needs before its weights; all that `--dry-run` builds of it."""

    config: Config  # resolved
    features: Features
    environment: "LoadedEnvironment | None"
    tokenizer: PreTrainedTokenizerBase
    folder: RunFolder
    loss: "Loss"
    advantages: AdvantageRule
    data: RunData
    builder: "SampleBuilder | None"  # of supervised samples
    held_out: dict[str, list[Sample]] | None  # supervised, by evaluation set
    make_engine: "Callable[..., RolloutEngine] | None"
    reward: WeightedSum
    rewards: ParallelReward | None


def prepare(
    config: Config,
    files: Path,
    stack: ExitStack,
    *,
    dataset: Sequence[Mapping[str, Any]] | None = None,
    eval_dataset: Sequence[Mapping[str, Any]] | None = None,
) -> Prepared:
    """Resolve the configuration, read the data and try the rewards. Collective.

    files: the model's folder, without weights. stack: closes the rewards.
    """
    with raise_on_all_ranks(ConfigError, "packages"):
        check_packages(config)
    config, dtype_line = resolve_dtype(config)
    features = load_features(config, files)
    environment = load_environment(config)
    processor = features.prompt_processor
    tokenizer = open_tokenizer(config, files, processor)
    config = resolve(config, tokenizer, environment)
    folder = open_folder(config)
    if dtype_line:
        log.info(dtype_line)
    with raise_on_all_ranks(DataError, "--prompt-data"):
        name = config.algorithm.loss
        loss = registry.resolve(name, LOSSES, flag="--loss", call=lambda f: f("batch", "logprobs", "config"))
        data_name, key = config.data.prompt_data, config.data.reward_key
        has_environment = environment is not None
        summed = build_reward(config.reward, prompt_data=data_name, has_environment=has_environment, key=key)
        if config.generates and "auto" in config.reward.reward:
            log.info("--reward auto: %s", ", ".join(part.name for part in summed.components))
        if config.data.eval_set_options:
            from fsdptrain.trainer.evaluation import with_set_rewards

            summed = with_set_rewards(summed, config, has_environment=has_environment)
        advantages = advantage_rule(config)
        with stage("reading --prompt-data"):
            data = build_data(config, tokenizer, dataset, environment, processor, eval_dataset=eval_dataset)
        builder = None
        if config.algorithm.algorithm == "sft":
            from fsdptrain.trainer.samples.sft import open_builder

            builder = open_builder(config, files, tokenizer, data.stream)
        make_engine = (
            engine_factory(config.rollout.engine) if config.generates and not config.run.replay_rollouts else None
        )
        if environment is not None and environment.is_agent:
            _ = AGENT_SAMPLER["agent"]  # imports the packages of agents
    require_same_data(data.stream)
    held_out = None
    if builder is not None and data.supervised:
        from fsdptrain.trainer.sft_evaluation import held_out_samples

        held_out = {name: held_out_samples(config, builder, name, own) for name, own in data.supervised.items()}
    with stage("trying --reward"):
        rewards = open_rewards(config, summed, data, environment, stack) if make_engine else None
    parts = (config, features, environment, tokenizer, folder, loss, advantages, data, builder, held_out)
    return Prepared(*parts, make_engine, summed, rewards)


@contextmanager
def build_loop(
    config: Config, *, trainer: "Trainer", stop: StopRequest, **data_and_reward: Any
) -> Iterator[TrainingLoop]:
    """Prepare the run, then build the model and the engine. Close all of them on exit. Arguments: see `prepare`."""
    with ExitStack() as stack:
        files = resolve_checkpoint(config.model.hf_checkpoint, weights=False)
        run = prepare(config, files, stack, **data_and_reward)
        trainer.config = config = run.config
        checkpoint = resolve_checkpoint(config.model.hf_checkpoint)
        if config.run.push_to_hub is not None:
            from fsdptrain.trainer.hub import open_repository

            open_repository(config)
        folder, data = run.folder, run.data
        if folder.checkpoint is not None or (config.run.num_rollout and config.run.keep_last):
            from fsdptrain.trainer.inputs import bind_inputs

            folder = bind_inputs(config, folder, checkpoint, data, run.reward, run.environment)
        wrap = memory = None
        if config.run.record_rollouts or config.run.replay_rollouts:
            from fsdptrain.trainer.samples.recorded import open_recorded

            wrap = open_recorded(config, folder)
        loggers = open_loggers(config, folder, stack)
        if platform.has_accelerator():  # a CPU swaps
            from fsdptrain.memory.report import MemoryReport

            memory = MemoryReport(config)
            stack.enter_context(memory.naming_flags())
        with stage("loading the model"):
            backend = open_backend(config, run.features, before_load=memory and memory.before_load)
        with stage("building the engine"):
            engine = open_engine(config, backend, run.make_engine, checkpoint) if run.make_engine else None
        phases = Phases(config, backend, engine)
        sampler = evaluation = weight_sync = threads = None
        if engine is not None and run.rewards is not None:
            stack.callback(engine.close)
            if config.sync.max_staleness:
                from fsdptrain.trainer.samples.continuous import open_threads

                has_deadlines = run.environment is not None and run.environment.is_agent
                threads = open_threads(config, engine, stack, has_deadlines=has_deadlines)
            if use_features := getattr(engine, "use_features", None):  # its model needs hooks, for images in prompts
                use_features(backend.features)
            weight_sync = WeightSync(engine, backend, build_verifier(config, engine))
            sampler = build_sampler(config, run.tokenizer, engine, run.rewards, run.environment, stack)
            if data.prompts:
                from fsdptrain.trainer.evaluation import Evaluation

                evaluation = Evaluation(config, sampler, {name: own_share(own) for name, own in data.prompts.items()})
        if run.held_out is not None:
            from fsdptrain.trainer.sft_evaluation import LossEvaluation

            evaluation = LossEvaluation.of(config, backend, samples=run.held_out, data=data)
        planned, speed = memory and memory.planned, None
        if platform.has_accelerator():
            from fsdptrain.trainer.speed import Speed, model_flops, peak_tflops

            if peak := peak_tflops(platform.local_device()):
                speed = Speed(model_flops(backend.model), peak, copies=config.pack_copies)
        source = build_source(config, data.stream, run.builder, sampler, run.advantages, engine=engine, threads=threads)
        yield TrainingLoop(
            config=config,
            run_folder=folder,
            tokenizer=run.tokenizer,
            stream=data.stream,
            source=wrap(source) if wrap else source,
            loss=run.loss,
            advantages=run.advantages,
            backend=backend,
            weight_sync=weight_sync,
            evaluation=evaluation,
            phases=phases,
            report=Reporter(
                config, loggers, stream=data.stream, speed=speed, planned_memory=planned, folder=folder.path
            ),
            trainer=trainer,
            stop=stop,
        )


def open_loggers(config: Config, folder: RunFolder, stack: ExitStack) -> "list[Logger]":
    """Open the loggers of rank 0; `stack` closes them. If one fails, all ranks raise the error. Collective."""
    with raise_on_all_ranks(ConfigError, "--log-to"):
        loggers = build_loggers(
            config.log, folder.path, total_steps=config.run.num_rollout, resumed_step=folder.resumed_step, config=config
        )
    for logger in loggers:
        stack.callback(logger.close)
    return loggers


def open_engine(
    config: Config, backend: "TrainBackend", make: "Callable[..., RolloutEngine]", checkpoint: Path
) -> "RolloutEngine":
    """Build the engine. With --offload-train the device holds only the trainer's weights then, as in a weight sync."""
    if not config.sync.offload_train:
        return make(config, checkpoint=checkpoint, device=platform.local_device())
    backend.offload(keep_weights=True)
    engine = make(config, checkpoint=checkpoint, device=platform.local_device())
    engine.sleep()
    backend.onload()
    return engine
