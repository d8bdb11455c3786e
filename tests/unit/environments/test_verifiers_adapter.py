"""Environments of the real verifiers library, played without a server."""

import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdptrain.config import EnvironmentConfig
from fsdptrain.environments import StepThreads, build_environment
from fsdptrain.errors import ConfigError
from fsdptrain.types import Prompt, Turn

pytestmark = pytest.mark.slow


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    return lambda **kwargs: build_environment(
        EnvironmentConfig(environment="verifiers:vf-games", environment_kwargs=kwargs)
    )


def prompt_of(loaded: Any, index: int = 0) -> Prompt:
    row = loaded.dataset()[index]
    return Prompt(f"r{index}", [1], "", label=row["label"], metadata=row["metadata"])


def play(loaded: Any, responses: list[str], index: int = 2) -> list[Turn]:
    environment = loaded.environment
    state = environment.reset(prompt_of(loaded, index), 0)
    turns = [environment.step(state, response) for response in responses]
    assert loaded.finish(state) is None
    return turns


def test_without_the_library_the_way_to_it_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "verifiers", None)  # as if it could not be imported
    with pytest.raises(ConfigError, match=r"--environment verifiers:x needs the library: pip install 'fsdptrain\[veri"):
        build_environment(EnvironmentConfig(environment="verifiers:x"))


def test_a_game_of_several_turns_is_played_and_scored_by_its_rubric(load):
    before = signal.getsignal(signal.SIGTERM)
    loaded = load()
    assert signal.getsignal(signal.SIGTERM) is before
    rows = loaded.dataset()
    assert [(m["role"], m["content"]) for m in rows[2]["prompt"]] == [("system", "Be brief."), ("user", "Guess 2")]
    assert rows[2]["label"] == "2"

    wrong, last = play(loaded, ["5", "2"])
    assert wrong == Turn([{"role": "user", "content": "try 1: not 5"}])
    assert last.done
    assert last.reward == {"right": 1.0, "quick": 0.5, "num_turns": 2.0, "reward": 1.25}


def test_its_own_limit_of_turns_ends_it(load):
    turns = play(load(max_turns=2), ["7", "8"])
    assert turns[-1].done
    assert turns[-1].reward == {"right": 0.0, "quick": 0.5, "num_turns": 2.0, "reward": 0.25}


def test_one_that_we_cut_short_is_scored_too(load):
    loaded = load(max_turns=-1)
    state = loaded.environment.reset(prompt_of(loaded, 2), 0)
    assert not loaded.environment.step(state, "7").done
    assert loaded.finish(state) == {"right": 0.0, "quick": 1.0, "num_turns": 1.0, "reward": 0.5}
    assert loaded.finish(state) is None


def test_a_single_turn(load):
    [turn] = play(load(kind="single"), ["2"])
    assert (turn.done, turn.reward["reward"]) == (True, 1.5)


def test_tools_are_called_by_verifiers(load):
    loaded = load(kind="tools")
    assert loaded.tools[0]["function"]["name"] == "times"
    assert set(loaded.tools[0]["function"]["parameters"]["properties"]) == {"a", "b"}
    call = '<tool_call>{"name": "times", "arguments": {"a": 6, "b": 7}}</tool_call>'
    broken = '<tool_call>{"name": "times", "arguments": {"a": 6}}</tool_call>'
    first, second, last = play(loaded, [f"Let me see. {call}{call}", broken, "2"])
    assert first.observation == [{"role": "tool", "content": "42"}] * 2
    assert "missing 1 required positional argument" in second.observation[0]["content"]
    assert last.done
    assert last.reward["reward"] == 1.0
    assert last.reward["times_calls"] == 3.0


@pytest.mark.parametrize(("word", "error"), [("crash", "the game has crashed"), ("bug", "bug")])
def test_an_environment_that_fails_says_why(load, word, error):
    loaded = load()
    state = loaded.environment.reset(prompt_of(loaded), 0)
    with pytest.raises((RuntimeError, KeyError), match=error):
        loaded.environment.step(state, word)
    assert loaded.finish(state) is None


def test_episodes_run_side_by_side_and_one_that_hangs_is_left(load):
    loaded = load()
    threads = StepThreads(num_threads=8, timeout=5.0)
    states = threads.run([lambda i=i: loaded.environment.reset(prompt_of(loaded, i % 4), 0) for i in range(8)])
    answers = ["hang", *["2"] * 7]
    turns = threads.run([lambda s=s, a=a: loaded.environment.step(s, a) for s, a in zip(states, answers, strict=True)])
    assert isinstance(turns[0], TimeoutError)
    assert [turn.done for turn in turns[1:]] == [i % 4 == 2 for i in range(1, 8)]
    assert loaded.finish(states[0]) is None
    rewards = [loaded.finish(state) for state, turn in zip(states[1:], turns[1:], strict=True) if not turn.done]
    assert all(reward["reward"] == 0.5 for reward in rewards)


def test_what_cannot_be_one_sequence_is_an_error(load):
    loaded = load(kind="rewriting")
    state = loaded.environment.reset(prompt_of(loaded), 0)
    with pytest.raises(ValueError, match="rewrites what was said before"):
        loaded.environment.step(state, "7")
    with pytest.raises(ConfigError, match="use --prompt-data environment"):
        loaded.environment.reset(Prompt("x", [1], ""), 0)
