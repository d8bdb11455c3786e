"""Multi-turn episodes: the model and an environment take turns, and each conversation becomes one sample."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fsdptrain.config import Config
from fsdptrain.data.chat import TurnRenderer
from fsdptrain.data.routes import sample_routes
from fsdptrain.data.rows import as_messages
from fsdptrain.distributed import any_rank
from fsdptrain.protocols import RolloutEngine
from fsdptrain.rewards.parallel import ParallelReward
from fsdptrain.rewards.values import RewardResult, to_result
from fsdptrain.threads import StepThreads
from fsdptrain.trainer.phases import Stopwatch
from fsdptrain.trainer.samples.environment import Agent, LoadedEnvironment, Mixture
from fsdptrain.trainer.samples.episode_rewards import compute_episode_rewards
from fsdptrain.trainer.samples.single_turn import GenerationRound, generate_with, rollout_errors, text_of
from fsdptrain.types import Completion, Message, Prompt, Sample, SamplingParams, Turn

ROLES = ("user", "tool", "system")  # roles of an observation; `assistant` is the model
REPLY_TIMEOUT = 60.0  # of an environment [s]
_NEVER = object()  # state of an episode that has not started


@dataclass
class Conversation:
    """A running episode.

    Tokens are those after the prompt. Model tokens are kept as sampled; environment tokens are rendered once.
    """

    prompt: Prompt
    sample_index: int
    max_tokens: int
    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # weight version of each token
    messages: list[Message] = field(default_factory=list)
    routes: list[Tensor | None] = field(default_factory=list)  # as reported by the engine, per turn
    num_turns: int = 0
    state: Any = _NEVER
    rewards: dict[str, float] | None = None
    active: bool = True
    done: bool = False
    truncated: bool = False
    error: str | None = None

    @property
    def next_prompt(self) -> Prompt:
        """The conversation so far as a prompt. Its id determines the random draws of the next turn."""
        name = f"{self.prompt.id}#{self.sample_index}@{self.num_turns}"
        left = self.max_tokens - len(self.token_ids)
        return Prompt(name, [*self.prompt.token_ids, *self.token_ids], "", max_tokens=left)

    @property
    def response(self) -> str:
        """The last message of the model."""
        return next(message["content"] for message in reversed(self.messages) if message["role"] == "assistant")

    def add_completion(self, completion: Completion, text: str) -> None:
        """Append the model's turn. Truncates it here if the engine ignored the token limit of the prompt."""
        ids = completion.token_ids[: self.max_tokens - len(self.token_ids)]
        self.truncated = completion.finish_reason == "length" or len(ids) < len(completion.token_ids)
        self.token_ids += ids
        self.loss_mask += [True] * len(ids)
        self.logprobs += completion.logprobs[: len(ids)]
        self.versions += completion.token_versions[: len(ids)]
        self.messages.append({"role": "assistant", "content": text})
        length = len(self.prompt.token_ids) + len(self.token_ids)
        self.routes.append(None if completion.routes is None else completion.routes[:length])
        self.num_turns += 1

    def add_observation(self, observation: Sequence[Message], ids: Sequence[int]) -> None:
        """Append the environment's turn. Ends the episode if no tokens remain for the model's response."""
        if len(self.token_ids) + len(ids) >= self.max_tokens:
            self.truncated, self.active = True, False
            return
        self.token_ids += ids
        self.loss_mask += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += self.versions[-1:] * len(ids)  # unused for environment tokens
        self.messages += observation

    def add_reward(self, reward: Any) -> None:
        """Add `reward` to the total, part by part. Raises TypeError or ValueError if it is not a reward."""
        result = to_result(reward)
        if result.reward is not None:
            earlier = self.rewards or {}
            parts = {**result.rewards, "reward": result.reward}
            self.rewards = earlier | {name: earlier.get(name, 0.0) + value for name, value in parts.items()}

    def fail(self, error: Exception) -> None:
        self.error = self.error or f"--environment: {type(error).__name__}: {error}"
        self.active = False


@dataclass
class MultiTurn:
    """Runs the episodes of all prompts in lockstep, with one engine call per turn.

    In the collective mode, turns continue until no rank has an active episode. In flight, they continue until this rank
    has none.
    """

    engine: RolloutEngine
    environment: LoadedEnvironment
    reward: ParallelReward
    renderer: TurnRenderer
    threads: StepThreads
    tokenizer: PreTrainedTokenizerBase
    max_turns: int

    @classmethod
    def of(cls, config: Config, tokenizer: PreTrainedTokenizerBase, **fields: Any) -> "MultiTurn":
        """Build the sampler of a run with --environment."""
        options = config.environment
        timeout = options.environment_timeout or REPLY_TIMEOUT
        return cls(
            **fields,
            renderer=TurnRenderer(tokenizer, data=config.data, max_observation_len=options.max_observation_len),
            threads=StepThreads(num_threads=options.environment_workers, timeout=timeout),
            tokenizer=tokenizer,
            max_turns=options.max_turns,
        )

    def sample(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, watch: Stopwatch, *, in_flight: bool = False
    ) -> GenerationRound:
        generate = generate_with(self.engine, self.tokenizer, in_flight=in_flight)
        episodes = [
            Conversation(prompt, index, sampling.max_tokens)
            for prompt in prompts
            for index in range(sampling.num_samples)
        ]
        active, requests, params = episodes, list(prompts), sampling
        while True:
            with rollout_errors(in_flight=in_flight):
                with watch("generate"):
                    completions = generate(requests, params)
                with watch("reward"):
                    self._take_turn(active, completions, sampling)
            active = [episode for episode in episodes if episode.active]
            if not (active if in_flight else any_rank(bool(active))):
                break
            requests, params = [episode.next_prompt for episode in active], replace(sampling, num_samples=1)
        with rollout_errors(in_flight=in_flight), watch("reward"):
            self._finish(episodes)
            results = compute_episode_rewards(self.reward, episodes)
            if isinstance(mixture := self.environment.environment, Mixture):
                pairs = zip(results.results, episodes, strict=True)
                results = replace(results, results=[mixture.tagged(result, each.prompt) for result, each in pairs])
            return GenerationRound(
                samples=[_sample(*row) for row in zip(episodes, results.results, strict=True)],
                prompts=[episode.prompt for episode in episodes],
                texts=[str(self.tokenizer.decode(episode.token_ids)) for episode in episodes],
                results=results,
            )

    def _take_turn(
        self, active: Sequence[Conversation], completions: Sequence[Completion], sampling: SamplingParams
    ) -> None:
        """Apply one turn of the model and of the environment to each active episode."""
        for episode, completion in zip(active, completions, strict=True):
            episode.add_completion(completion, text_of(completion, self.tokenizer, sampling.stop))
        turns = self.threads.run([self._step(episode, sampling.seed) for episode in active])
        for episode, turn in zip(active, turns, strict=True):
            if isinstance(turn, Exception):
                episode.fail(turn)
                continue
            episode.done = turn.done
            cut_short = episode.truncated or episode.num_turns == self.max_turns
            episode.truncated |= cut_short and not turn.done
            episode.active = not turn.done and not cut_short
            if episode.active:
                ids = self.renderer.between(turn.observation, last_token=episode.token_ids[-1])
                episode.add_observation(as_messages(turn.observation), ids)

    def _step(self, episode: Conversation, seed: int) -> Callable[[], Turn]:
        environment, response = self.environment.of(episode.prompt).environment, episode.response
        assert not isinstance(environment, Agent | Mixture)

        def call() -> Turn:
            if episode.state is _NEVER:
                episode.state = environment.reset(episode.prompt, prompt_seed(seed, episode.prompt.id))
            turn = checked(environment.step(episode.state, response))
            episode.add_reward(turn.reward)
            return turn

        return call

    def _finish(self, episodes: Sequence[Conversation]) -> None:
        """Call `finish` of the environment for all started episodes. Failed episodes may hold resources too."""
        begun = [(e, self.environment.of(e.prompt).finish) for e in episodes if e.state is not _NEVER]
        ending = [(episode, finish) for episode, finish in begun if finish is not None]

        def end(episode: Conversation, finish: Callable[[Any], Any]) -> None:
            episode.add_reward(finish(episode.state))

        for (episode, _), ended in zip(ending, self.threads.run([partial(end, *e) for e in ending]), strict=True):
            if isinstance(ended, Exception):
                episode.fail(ended)


def prompt_seed(seed: int, prompt_id: str) -> int:
    """Compute the environment seed of a prompt. All samples of the prompt share it; it is the same on every machine."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{prompt_id}".encode(), digest_size=4).digest(), "big")


def checked(turn: Any) -> Turn:
    """Validate the result of `step`. Raises TypeError if it is not a valid turn."""
    if not isinstance(turn, Turn):
        raise TypeError(f"step returned {turn!r:.80}, it must return a fsdptrain.types.Turn")
    for message in as_messages(turn.observation):
        known = isinstance(message, Mapping) and message.get("role") in ROLES
        if not known or not isinstance(message.get("content"), str):
            raise TypeError(f"an observation is a text or messages of {', '.join(ROLES)}, got {message!r:.80}")
    return turn


def _sample(episode: Conversation, result: RewardResult) -> Sample:
    num_prompt = len(episode.prompt.token_ids)
    first, several = next(iter(episode.versions), 0), len(set(episode.versions)) > 1
    return Sample(
        group_id=episode.prompt.id,
        token_ids=[*episode.prompt.token_ids, *episode.token_ids],
        loss_mask=[False] * num_prompt + episode.loss_mask,
        rollout_logprobs=[0.0] * num_prompt + episode.logprobs,
        reward=result.reward,
        rewards=result.rewards,
        error=episode.error,
        policy_version=first,
        versions=[first] * num_prompt + episode.versions if several else None,
        truncated=episode.truncated,
        routes=sample_routes(episode.routes, num_prompt + len(episode.token_ids)),
    )
