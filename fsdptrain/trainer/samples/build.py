"""Build what makes samples: rewards, the sampler, the evaluation, builders of supervised samples, the source."""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from fsdptrain import registry
from fsdptrain.algo.advantages import AdvantageRule
from fsdptrain.config import Config
from fsdptrain.data.prompts import make_prompt
from fsdptrain.data.stream import PromptSource
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import ConfigError
from fsdptrain.protocols import RewardFunction, RolloutEngine
from fsdptrain.rewards.build import WeightedSum, reads_environment
from fsdptrain.rewards.parallel import ParallelReward, build_parallel
from fsdptrain.rollout.sampling import sampling_params
from fsdptrain.trainer.data import RunData
from fsdptrain.trainer.rules import selection_rules, shaping_rule
from fsdptrain.trainer.samples.single_turn import Sampler, SingleTurn
from fsdptrain.trainer.samples.source import RolloutSource, SampleSource, own_share
from fsdptrain.types import Episode, Prompt

if TYPE_CHECKING:
    from fsdptrain.trainer.evaluation import Evaluation
    from fsdptrain.trainer.samples.background import Background
    from fsdptrain.trainer.samples.environment import LoadedEnvironment
    from fsdptrain.trainer.samples.sft import Builders
    from fsdptrain.trainer.sft_evaluation import LossEvaluation

log = logging.getLogger(__name__)

# imported when a run has an agent
AGENT_SAMPLER = registry.Table[Callable[..., Sampler]]({"agent": "fsdptrain.agents.sampler:build_agent_sampler"})


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
    background: "Background | None",
) -> SampleSource:
    if builders is not None:
        from fsdptrain.trainer.samples.sft import SftSource

        return SftSource.of(config, stream, builders)
    assert sampler is not None, "reinforcement learning has an engine"
    values: dict[str, Any] = {
        "stream": stream,
        "sampler": sampler,
        "sampling": sampling_params(config, with_routes=any(section.records_routes for section in config.sections)),
        "num_prompts": config.rollout.batch_size,
        "num_shown": config.log.num_samples,
        "shaping": shaping_rule(config),
        "advantages": advantages,
        "max_unscored_fraction": config.reward.max_unscored_fraction,
        "rules": selection_rules(config),
        "max_staleness": config.sync.max_staleness,
        "num_rollouts": config.run.num_rollout,
    }
    if background is None:
        return RolloutSource(**values)
    from fsdptrain.trainer.samples.continuous import ContinuousSource

    return ContinuousSource(
        **values, **vars(background), partial=config.sync.partial_rollout, timeout=config.launch.dist_timeout
    )
