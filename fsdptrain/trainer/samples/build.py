"""Build the parts that produce samples: rewards, the sampler, builders of supervised samples, the source."""

import logging
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from fsdptrain import registry
from fsdptrain.algo.advantages import ADVANTAGES, AdvantageRule
from fsdptrain.config import Config
from fsdptrain.config.rules import Fact
from fsdptrain.data.prompts import PromptStream, make_prompt
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import ConfigError
from fsdptrain.rewards.build import WeightedSum
from fsdptrain.rewards.parallel import ParallelReward, build_parallel
from fsdptrain.rollout.sampling import sampling_params
from fsdptrain.trainer.data import RunData
from fsdptrain.trainer.samples.single_turn import Sampler, SingleTurn
from fsdptrain.trainer.samples.source import RolloutSource
from fsdptrain.types import Episode

if TYPE_CHECKING:
    from fsdptrain.algo.shaping import ShapingRule
    from fsdptrain.data.sft import SampleBuilder
    from fsdptrain.protocols import RolloutEngine
    from fsdptrain.trainer.samples.environment import LoadedEnvironment
    from fsdptrain.trainer.samples.sft import SftSource

log = logging.getLogger(__name__)

_TRIALS = 3  # rows that rewards are tried on before the model is loaded

# imported when a run has an agent
AGENT_SAMPLER = registry.Table[Callable[..., Any]]({"agent": "fsdptrain.agents.sampler:build_agent_sampler"})


def open_rewards(
    config: Config, reward: WeightedSum, data: RunData, environment: "LoadedEnvironment | None", stack: ExitStack
) -> ParallelReward:
    """Start the rewards. Rank 0 tries custom rewards once. Raises ConfigError on all ranks. Collective."""
    with raise_on_all_ranks(ConfigError, "--reward"):
        rewards = build_parallel(config, reward)
        stack.callback(rewards.close)
        stream = data.stream
        rows = [stream.rows[index] for index in range(min(_TRIALS, len(stream.rows)))]
        make = partial(make_prompt, tokenizer=stream.tokenizer, data=stream.data, processor=stream.processor)
        prompts = [*map(make, rows), *(prompt for own in data.prompts.values() for prompt in own[:_TRIALS])]
        if environment is not None:
            episode = Episode((), None, done=True)
            prompts = [replace(prompt, metadata={**prompt.metadata, "episode": episode}) for prompt in prompts]
        for line in rewards.check(prompts, call=dist.get_rank() == 0):
            if environment is None and config.reward.max_unscored_fraction < 1.0:  # no episode has run yet
                raise ConfigError(f"{line}; fix it, or set --max-unscored-fraction 1 to leave such samples out")
            log.warning("%s", line)
    return rewards


def build_sampler(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    engine: "RolloutEngine",
    reward: ParallelReward,
    environment: "LoadedEnvironment | None",
    stack: ExitStack,
) -> Sampler:
    """Build the sampler of single responses, or of episodes. stack: closes the endpoint of agents."""
    if environment is None:
        return SingleTurn(engine, reward, tokenizer)
    options: dict[str, Any] = {"engine": engine, "reward": reward}
    if environment.is_agent:
        with raise_on_all_ranks(ConfigError, "--environment"):
            sampler = AGENT_SAMPLER["agent"](config, tokenizer, agent=environment.environment, **options)
            stack.callback(sampler.close)
            return sampler
    from fsdptrain.trainer.samples.multi_turn import MultiTurn

    return MultiTurn.of(config, tokenizer, environment=environment, **options)


def build_source(
    config: Config,
    stream: PromptStream,
    builder: "SampleBuilder | None",
    sampler: Sampler | None,
    advantages: AdvantageRule,
    *,
    engine: "RolloutEngine | None",
    threads: Executor | None,
) -> "RolloutSource | SftSource":
    """Build the source of training samples. threads: where groups are generated with --max-staleness."""
    if builder is not None:
        from fsdptrain.trainer.samples.sft import SftSource

        return SftSource(stream, builder, num_samples=config.samples_per_rollout)
    assert sampler is not None or config.run.replay_rollouts, "reinforcement learning has an engine"
    values: dict[str, Any] = {
        "stream": stream,
        "sampler": sampler,
        "sampling": sampling_params(config, with_routes=config.has(Fact.RECORDS_ROUTES)),
        "num_prompts": config.rollout.batch_size,
        "num_shown": config.log.num_samples,
        "shaping": shaping_rule(config),
        "advantages": advantages,
        "max_unscored_fraction": config.reward.max_unscored_fraction,
    }
    if config.selection.dynamic_sampling:
        from fsdptrain.trainer.samples.selection import SelectionRules

        values["rules"] = SelectionRules(dynamic=True, max_rounds=config.selection.dynamic_sampling_max_rounds)
    if threads is None:
        return RolloutSource(**values)
    from fsdptrain.trainer.samples.continuous import ContinuousSource

    return ContinuousSource.of(config, engine, threads, values)


def shaping_rule(config: Config) -> "ShapingRule | None":
    """Build the rule that shapes rewards by length. None without --overlong-penalty."""
    if not config.shaping.overlong_penalty:
        return None
    from fsdptrain.algo.shaping import ShapingRule

    return ShapingRule(config.rollout.max_response_len, config.overlong_buffer, config.shaping.overlong_penalty)


def advantage_rule(config: Config) -> AdvantageRule:
    """Build the rule that turns rewards into advantages.

    Raises ConfigError if the estimator cannot be imported or is not a function.
    """
    name = config.algorithm.advantage_estimator
    estimate = registry.resolve(name, ADVANTAGES, flag="--advantage-estimator", call=lambda f: f("rewards", "lengths"))
    if not callable(estimate):
        raise ConfigError(f"--advantage-estimator {name} is not a function (rewards, lengths) -> advantages")
    if name not in ADVANTAGES:
        from fsdptrain.algo.estimators import user_estimator

        estimate = user_estimator(estimate, name)
    return AdvantageRule(estimate, config.advantage_scale)
