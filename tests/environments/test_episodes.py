"""Episodes of verifiers and OpenEnv with a scripted model: tools, errors, and programs that hang or die."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdptrain.agents.harness import AgentError
from fsdptrain.config import load_recipe
from fsdptrain.environments.openenv import OpenEnv
from fsdptrain.environments.verifiers import Verifiers
from fsdptrain.errors import ConfigError
from tests.agents.scripted import ScriptedEpisodes
from tests.environments.conftest import OPENENV, VERIFIERS, words_of_nltk

Play = Callable[..., Any]
Close = Callable[[Any], Any]
RECIPES = Path(__file__).parents[2] / "recipes"
SUNNY = ["sunny in Rome", "sunny in Oslo"]


@pytest.fixture
def closing() -> Iterator[Close]:
    """Close agents after the test."""
    agents: list[Any] = []

    def add(agent: Any) -> Any:
        agents.append(agent)
        return agent

    yield add
    for agent in agents:
        agent.close()


def test_verifiers_serves_the_tools_of_a_task_and_computes_its_rewards(
    play: Play, closing: Close, episodes: ScriptedEpisodes
) -> None:
    agent = closing(Verifiers("weather", python=VERIFIERS, num_tasks=2))
    assert [row["prompt"] for row in agent.dataset()] == ["Rome Oslo"] * 2  # of a taskset that does not end
    assert play(agent, agent.dataset()[0]) == {"sunny": 1.0, "reward": 1.0}
    first, second = episodes.calls
    assert first.tools[0]["function"]["name"] == "weather_report"
    assert [message["content"] for message in (second.messages or ())[2:]] == SUNNY


def test_a_verifiers_episode_that_fails_or_hangs_costs_itself(
    play: Play, closing: Close, episodes: ScriptedEpisodes
) -> None:
    taskset = {"id": "letters", "words": ["raises", "wait", "refuse", "blocks", "one"]}
    agent = closing(Verifiers(taskset, python=VERIFIERS, player={"max_turns": 2}))
    raises, wait, refuse, blocks, one = agent.dataset()
    with pytest.raises(AgentError, match=r"EnvError: .* no such word"):
        play(agent, raises)
    with pytest.raises(TimeoutError):
        play(agent, wait, 6.0)  # long enough for its call on a busy machine
    assert episodes.cancelled.wait(20)  # its call of the model too
    assert play(agent, refuse)["turns"] == 0  # the prompt is too long
    with pytest.raises(TimeoutError):
        play(agent, blocks, 0.5)
    assert play(agent, one)["letters"] == 0.5 * len("say one" + "more")


def test_textarena_rewards_the_model_that_finds_the_word(
    play: Play, closing: Close, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NLTK_DATA", str(words_of_nltk(tmp_path, "game")))
    agent = closing(Verifiers({"id": "textarena", "game": "Hangman-v0"}, python=VERIFIERS, num_tasks=1))
    # The model repeats the message, which begins with [GAME].
    assert play(agent, agent.dataset()[0]) == {"game_reward": 1.0, "reward": 1.0}


def test_openenv_tools_are_tools_of_the_model(play: Play, closing: Close, episodes: ScriptedEpisodes) -> None:
    agent = closing(OpenEnv(app="weather_app:app", python=OPENENV, instruction="Rome Oslo"))
    assert play(agent, agent.dataset()[3]) == {"reward": 1.0, "invalid_action": 0.0}
    first, second = episodes.calls
    assert first.tools[0]["function"]["name"] == "report"
    assert (second.messages or ())[-1]["content"] == "sunny in {}"


def test_the_openenv_server_of_the_recipe_rewards_the_number(play: Play, closing: Close) -> None:
    recipe = load_recipe(RECIPES / "openenv_guess_number_qwen3_4b.yaml")
    agent = closing(OpenEnv(**recipe.environment.environment_kwargs, python=OPENENV))
    first, *_ = rows = agent.dataset()
    assert len(rows) == 1000
    assert "a number from 1 to 100" in first["prompt"]
    assert play(agent, first) == {"reward": 0.0, "invalid_action": 0.0}  # the model repeats the hint


def test_an_openenv_episode_that_fails_hangs_or_dies_costs_itself(play: Play, closing: Close) -> None:
    agent = closing(OpenEnv(app="letters_app:app", python=OPENENV, num_tasks=8))
    good, *_, raises, dies, hangs = agent.dataset()
    for row, error in ((raises, "no such word"), (dies, "its process ended with exit code 3")):
        with pytest.raises(AgentError, match=error):
            play(agent, row)
        assert play(agent, good) == {"reward": 0.5 * len("game 0" + "more"), "invalid_action": 0.0}
    with pytest.raises(TimeoutError):
        play(agent, hangs, 1.0)
    assert play(agent, good)["reward"] > 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Verifiers("letters", python="no/python"), "there is no program no/python: `make verifiers` builds it"),
        (lambda: Verifiers("letters", python=sys.executable), "No module named 'verifiers'"),
        (lambda: OpenEnv(app="no_such_app:app", python=OPENENV), "No module named 'no_such_app'"),
        (lambda: OpenEnv(url="http://127.0.0.1:9", python=OPENENV), "ConnectError"),
        (lambda: OpenEnv(python=OPENENV), "set url or app"),
    ],
)
def test_an_environment_that_is_not_there_is_one_line(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert message in str(caught.value)
    assert str(caught.value).startswith("--environment ")
    assert "\n" not in str(caught.value)
