"""Samples from agents, programs that call the model at an endpoint with the OpenAI API. See docs/environments.md."""

import asyncio
import logging
import math
import secrets
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from fsdptrain.agents.calls import Answer, CallError, Choice, ModelCall
from fsdptrain.agents.endpoint import Endpoint
from fsdptrain.agents.generation import Generation, generation_with
from fsdptrain.agents.harness import MODEL, AgentError, AsyncFunction, Command, Harness
from fsdptrain.agents.prompts import CallRenderer, assistant_message
from fsdptrain.agents.record import AnsweredCall, Conversation, Record, conversation_of, samples_of
from fsdptrain.config import Config, EnvironmentConfig
from fsdptrain.errors import ConfigError, RolloutError, describe
from fsdptrain.model.loading.meta import model_config, resolve_checkpoint
from fsdptrain.protocols import RolloutEngine
from fsdptrain.rewards.parallel import ParallelReward
from fsdptrain.rewards.values import to_result
from fsdptrain.rollout.stop_strings import cut
from fsdptrain.threads import StepThreads
from fsdptrain.trainer.phases import Stopwatch
from fsdptrain.trainer.samples.environment import Agent
from fsdptrain.trainer.samples.episode_rewards import compute_episode_rewards
from fsdptrain.trainer.samples.single_turn import GenerationRound, rollout_errors
from fsdptrain.types import Completion, Message, Prompt, Sample, SamplingParams
from fsdptrain.vllm.config import VllmConfig

log = logging.getLogger(__name__)

GRACE_S = 5.0  # for an episode to end itself at its deadline
COUNTS = ("calls", "continued_calls", "new_sequences", "failed_episodes", "refused_calls", "other_sampling")


@dataclass(eq=False)
class AgentEpisode:
    """A running episode and what its calls have recorded."""

    prompt: Prompt
    sample_index: int
    sampling: SamplingParams
    generation: Generation
    key: str = field(default_factory=lambda: f"sk-{secrets.token_urlsafe(24)}")
    record: Record = field(default_factory=Record)
    messages: list[Message] = field(default_factory=list)  # of the last answered call, with its response
    response: str = ""  # of the last answered call
    rewards: dict[str, float] | None = None
    done: bool = False  # the agent has ended by itself
    error: str | None = None
    num_calls: int = 0
    last_call: tuple[int, int] = (-1, 0)  # of `response`
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))

    def set_reward(self, reward: Any) -> None:
        """Raises TypeError or ValueError if it is no reward."""
        result = to_result(reward)
        if result.reward is not None:
            self.rewards = {**result.rewards, "reward": result.reward}

    def add(self, call: AnsweredCall, conversation: Conversation, messages: list[Message], response: str) -> None:
        self.record.add(call, conversation)
        if call.number > self.last_call:
            self.last_call, self.messages, self.response = call.number, messages, response

    def fail(self, reason: str) -> None:
        self.error = self.error or f"--environment: {reason}"


class OpenEpisodes:
    """The episodes whose keys the endpoint accepts. Implements `calls.Episodes`."""

    model = MODEL

    def __init__(self, renderer: CallRenderer, *, max_prompt_len: int, max_positions: int | None) -> None:
        """max_positions: of the model or the engine, None: no limit [tokens]"""
        self.renderer = renderer
        self.max_prompt_len = max_prompt_len
        self.max_positions = max_positions
        self._open: dict[str, AgentEpisode] = {}
        self._lock = threading.Lock()  # of `_open` and of what calls add to episodes
        self._warned: set[str] = set()

    def open(self, episode: AgentEpisode) -> None:
        with self._lock:
            self._open[episode.key] = episode

    def close(self, episode: AgentEpisode) -> None:
        """End the episode: later answers are not recorded."""
        with self._lock:
            self._open.pop(episode.key, None)

    def is_open(self, key: str) -> bool:
        return key in self._open

    def add_reward(self, key: str, reward: Any) -> None:
        try:
            self._episode(key).set_reward(reward)
        except (TypeError, ValueError) as error:
            raise CallError(400, str(error)) from error

    async def answer(self, key: str, call: ModelCall) -> Answer:
        episode = self._episode(key)
        number, episode.num_calls = episode.num_calls, episode.num_calls + 1
        try:
            return await self._answer(episode, call, number)
        except CallError:
            episode.counts["refused_calls"] += 1
            raise

    async def _answer(self, episode: AgentEpisode, call: ModelCall, number: int) -> Answer:
        prompt_ids, parent, conversation = self.renderer.prompt_of(call, episode.record)
        remaining = self._remaining(prompt_ids, parent, episode.sampling.max_tokens)
        self._count_other_sampling(episode, call)
        max_tokens = min(remaining, call.max_tokens or remaining)
        name = f"{episode.prompt.id}#{episode.sample_index}@{number}"
        futures: list[Future[Completion]] = []
        try:
            for index in range(call.num_choices):
                prompt = Prompt(f"{name}.{index}", prompt_ids, "", max_tokens=max_tokens)
                futures.append(episode.generation.submit(prompt, episode.sampling))
            completions = await asyncio.gather(*map(asyncio.wrap_future, futures))
        except RolloutError as error:
            raise CallError(500, str(error)) from error
        finally:
            for future in futures:
                future.cancel()
        rows = [self._cut(completion, call, max_tokens, episode.sampling.stop) for completion in completions]
        choices = [self._choice(*row, call, prompt_ids, (number, i)) for i, row in enumerate(rows)]
        with self._lock:
            if self._open.get(episode.key) is not episode:
                raise CallError(401, "the episode has ended")
            start = parent.end if parent else 0
            for index, (choice, (completion, text)) in enumerate(zip(choices, rows, strict=True)):
                message = assistant_message(choice.content, choice.tool_calls)
                answered = AnsweredCall(
                    parent,
                    (number, index),
                    start,
                    prompt_ids[start:],
                    completion,
                    truncated=choice.finish_reason == "length" and max_tokens == remaining,
                )
                key = (*conversation, *conversation_of([message], ())[1:])
                episode.add(answered, key, [*call.messages, message], text)
            episode.counts["calls"] += 1
            episode.counts["continued_calls"] += parent is not None
        return Answer(prompt_ids, choices)

    def _remaining(self, prompt_ids: Sequence[int], parent: AnsweredCall | None, max_tokens: int) -> int:
        """Return how many tokens may follow. Raises CallError for a prompt that the model cannot take."""
        num_first = parent.path[0].response_start if parent else len(prompt_ids)
        if num_first > self.max_prompt_len:
            limit = f"--rollout-max-prompt-len {self.max_prompt_len}"
            raise _too_long(f"the prompt has {num_first} tokens, more than {limit}")
        remaining = max_tokens - (len(prompt_ids) - num_first)
        if remaining < 1:
            limit = f"--rollout-max-response-len {max_tokens}"
            raise _too_long(f"the conversation has {len(prompt_ids) - num_first} tokens after its prompt, {limit}")
        if self.max_positions is not None:
            remaining = min(remaining, self.max_positions - len(prompt_ids))
            if remaining < 1:
                raise _too_long(f"the prompt has {len(prompt_ids)} tokens, the model {self.max_positions} positions")
        return remaining

    def _episode(self, key: str) -> AgentEpisode:
        try:
            return self._open[key]
        except KeyError:
            raise CallError(401, "the episode has ended") from None

    def _cut(
        self, completion: Completion, call: ModelCall, max_tokens: int, kept: Sequence[str]
    ) -> tuple[Completion, str]:
        """Cut at the limit, which an engine may ignore, and at the stop texts of the call and of the run. Returns the
        text too, which keeps those of the run."""
        ids = completion.token_ids[:max_tokens]
        ended = completion.finish_reason == "stop" and len(ids) == len(completion.token_ids)
        count, text, stopped = self.renderer.until_stop(ids, call.stop, kept, stopped=ended)
        if count == len(completion.token_ids):
            return replace(completion, finish_reason="stop") if stopped else completion, text
        return cut(completion, count, "stop" if stopped else "length"), text

    def _choice(
        self, completion: Completion, text: str, call: ModelCall, prompt_ids: Sequence[int], number: tuple[int, int]
    ) -> Choice:
        content, tool_calls = self.renderer.tool_calls_of(text, completion.token_ids, call, prompt_ids, number=number)
        is_call = tool_calls and completion.finish_reason == "stop"
        return Choice(
            tool_calls=tool_calls,
            content=content,
            finish_reason="tool_calls" if is_call else completion.finish_reason,
            token_ids=completion.token_ids,
            tokens=[self.renderer.token_text(token) for token in completion.token_ids],
            logprobs=completion.logprobs,
        )

    def _count_other_sampling(self, episode: AgentEpisode, call: ModelCall) -> None:
        """Requests cannot change the distribution that tokens are trained under. Warn once per parameter."""
        other = {n: v for n, v in call.sampling.items() if v != getattr(episode.sampling, n, v)}
        episode.counts["other_sampling"] += bool(other)
        for name in other.keys() - self._warned:
            self._warned.add(name)
            line = "an agent requests %s=%g; the value of the run, %g, is used, because training needs its distribution"
            log.warning(line, name, other[name], getattr(episode.sampling, name))


def _too_long(message: str) -> CallError:
    return CallError(400, message, param="messages", code="context_length_exceeded")


@dataclass
class AgentSampler:
    """Runs the episodes of all prompts of this rank concurrently. Each may be several sequences."""

    engine: RolloutEngine
    harness: Harness
    time_limit: float  # of all episodes of a rollout [s]
    episodes: OpenEpisodes
    endpoint: Endpoint
    reward: ParallelReward
    threads: StepThreads
    timeout: float  # of an episode [s]
    tokenizer: PreTrainedTokenizerBase

    def close(self) -> None:
        self.harness.close()
        self.endpoint.close()

    def sample(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, watch: Stopwatch, *, in_flight: bool = False
    ) -> GenerationRound:
        generation = generation_with(self.engine, in_flight=in_flight)
        episodes = [
            AgentEpisode(prompt, index, sampling, generation)
            for prompt in prompts
            for index in range(sampling.num_samples)
        ]
        with rollout_errors(in_flight=in_flight):
            with watch("generate"):
                self._run(episodes, generation, in_flight=in_flight)
            with watch("reward"):
                results = compute_episode_rewards(self.reward, episodes)
            samples = [_sample(*row) for row in zip(episodes, results.results, strict=True)]
            for episode, sample in zip(episodes, samples, strict=True):
                episode.counts["new_sequences"] = len(sample.others)
            return GenerationRound(
                samples=samples,
                prompts=[episode.prompt for episode in episodes],
                texts=[self._text(sample) for sample in samples],
                results=results,
                counts={f"agent/{name}": float(sum(e.counts[name] for e in episodes)) for name in COUNTS},
            )

    def _run(self, episodes: Sequence[AgentEpisode], generation: Generation, *, in_flight: bool) -> None:
        """Run all episodes. The engine works on this thread if it needs to."""
        if not episodes:
            return
        time_limit = math.inf if in_flight else self.time_limit  # in flight no other rank waits
        deadline, cancelled = time.monotonic() + time_limit, threading.Event()
        ended: Future[list[Exception | None]] = Future()
        calls = [partial(self._run_episode, episode, deadline, cancelled) for episode in episodes]

        def run() -> None:
            try:
                ended.set_result(self.threads.run(calls))
            except BaseException as error:  # noqa: BLE001  # the thread that waits raises it
                ended.set_exception(error)

        threading.Thread(target=run, daemon=True, name="episodes").start()
        try:
            generation.run_until(ended)
            for episode, result in zip(episodes, ended.result(), strict=True):
                if isinstance(result, TimeoutError):
                    episode.fail(f"the episode did not end within --environment-timeout {self.timeout:g} s")
                elif isinstance(result, Exception):
                    episode.fail(describe(result))
                elif not episode.record.calls:
                    refused = episode.counts["refused_calls"]
                    episode.fail(f"the agent made no model call{f'; {refused} were rejected' if refused else ''}")
        finally:
            cancelled.set()
            generation.close()
            for episode in episodes:
                self.episodes.close(episode)
                episode.counts["failed_episodes"] = int(episode.error is not None)

    def _run_episode(self, episode: AgentEpisode, deadline: float, cancelled: threading.Event) -> None:
        remaining = deadline - time.monotonic()
        if cancelled.is_set() or remaining <= 0:
            raise AgentError(
                f"the episodes of the rollout took {self.time_limit:g} s, half of --dist-timeout: raise it, or "
                "--environment-workers"
            )
        self.episodes.open(episode)
        try:
            timeout = min(self.timeout, remaining)
            reward = self.harness(episode.prompt, url=self.endpoint.url, key=episode.key, timeout=timeout)
            if episode.rewards is None:  # else the agent has posted one
                episode.set_reward(reward)
            episode.done = True
        finally:
            self.episodes.close(episode)

    def _text(self, sample: Sample) -> str:
        """Decode the first sequence after its prompt."""
        first = sample.loss_mask.index(True) if True in sample.loss_mask else len(sample.loss_mask)
        return str(self.tokenizer.decode(sample.token_ids[first:]))


def _sample(episode: AgentEpisode, result: Any) -> Sample:
    first, *others = [
        replace(sample, reward=result.reward, rewards=result.rewards)
        for sample in samples_of(episode.prompt, episode.record)
    ]
    return replace(first, others=tuple(others), error=episode.error)


def build_agent_sampler(
    config: Config, tokenizer: PreTrainedTokenizerBase, *, engine: RolloutEngine, reward: ParallelReward, agent: Agent
) -> AgentSampler:
    """Start the endpoint of a run with an agent. Raises ConfigError for options that agents do not support."""
    _check(config, engine)
    timeout = config.environment.environment_timeout or config.launch.dist_timeout / 3
    model = model_config(
        resolve_checkpoint(config.model.hf_checkpoint), trust_remote_code=config.model.trust_remote_code
    ).get_text_config(decoder=True)
    limits = [
        getattr(model, "max_position_embeddings", None),
        config.section(VllmConfig).engine_args.get("max_model_len"),
    ]
    episodes = OpenEpisodes(
        CallRenderer(tokenizer, config.data),
        max_prompt_len=config.prompt_budget,
        max_positions=min((limit for limit in limits if limit), default=None),
    )
    return AgentSampler(
        engine=engine,
        harness=Command(agent.command) if agent.function is None else AsyncFunction(agent.function),
        episodes=episodes,
        endpoint=Endpoint(episodes),
        reward=reward,
        threads=StepThreads(num_threads=config.environment.environment_workers, timeout=timeout + GRACE_S),
        timeout=timeout,
        time_limit=config.launch.dist_timeout / 2,
        tokenizer=tokenizer,
    )


def _check(config: Config, engine: RolloutEngine) -> None:
    if getattr(engine, "is_collective", False):
        raise ConfigError(
            "--rollout-engine-args tensor_parallel_size > 1 makes ranks generate together, which agents do not: "
            "use --rollout-engine vllm-server, or remove it"
        )
    defaults = EnvironmentConfig()
    for name in ("max_turns", "max_observation_len"):
        if getattr(config.environment, name) != getattr(defaults, name):
            raise ConfigError(
                f"--{name.replace('_', '-')} has no effect on an agent, which ends its episodes: remove it"
            )
