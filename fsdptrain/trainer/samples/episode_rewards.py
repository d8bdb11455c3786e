"""Rewards of episodes, which their environment or agent may give."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from fsdptrain.errors import ConfigError
from fsdptrain.rewards.parallel import ParallelReward, RewardResults, compute_rewards
from fsdptrain.rewards.values import RewardResult
from fsdptrain.types import Episode, Message, Prompt


class EndedEpisode(Protocol):
    prompt: Prompt
    messages: list[Message]
    rewards: dict[str, float] | None  # given by the environment
    done: bool
    error: str | None

    @property
    def response(self) -> str:
        """The last response of the model."""
        ...


def compute_episode_rewards(reward: ParallelReward, episodes: Sequence[EndedEpisode]) -> RewardResults:
    """Score the last response of each episode. Failed episodes get no reward."""
    if any(episode.rewards for episode in episodes) and not reward.reward.reads_environment:
        raise ConfigError(
            "--environment gives rewards, and --reward uses none of them: add `environment` to --reward, "
            "alone or with others"
        )
    good = [episode for episode in episodes if episode.error is None]
    computed = compute_rewards(reward, [_with_episode(e) for e in good], [e.response for e in good])
    results = iter(computed.results)
    first = next((episode.error for episode in episodes if episode.error is not None), None)
    return RewardResults(
        results=[next(results) if episode.error is None else RewardResult(None) for episode in episodes],
        num_unscored=computed.num_unscored + len(episodes) - len(good),
        first_error=first or computed.first_error,
    )


def _with_episode(episode: EndedEpisode) -> Prompt:
    ended = Episode(tuple(episode.messages), episode.rewards, episode.done)
    return replace(episode.prompt, metadata={**episode.prompt.metadata, "episode": ended})
