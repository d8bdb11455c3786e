"""Environments by import path. An invalid one is refused in one line."""

import pytest

from examples.calculator.calculator import Calculator
from fsdptrain.config import EnvironmentConfig
from fsdptrain.errors import ConfigError
from fsdptrain.trainer.samples.environment import build_environment
from fsdptrain.types import Prompt, Turn

HERE = "tests.unit.trainer.test_environment"


class Countdown:
    """Wants `turns` answers."""

    def __init__(self, turns: int = 3) -> None:
        self.turns = turns

    def reset(self, prompt: Prompt, seed: int) -> list[str]:
        return []

    def step(self, state: list[str], response: str) -> Turn:
        state.append(response)
        left = self.turns - len(state)
        return Turn(f"{left} more", done=left == 0, reward=1.0)


class RowsNotInAMethod(Countdown):
    dataset = ({"prompt": "?"},)


class WithoutStep:
    def reset(self, prompt: Prompt, seed: int) -> None: ...


thing = 3


def build(name: str, **kwargs):
    return build_environment(EnvironmentConfig(environment=name, environment_kwargs=kwargs))


def test_environments_are_classes():
    assert build_environment(EnvironmentConfig()) is None
    calculator = build("examples.calculator.calculator:Calculator", native_tools=True)
    assert calculator.environment == Calculator(native_tools=True)
    assert calculator.tools[0]["type"] == "function"
    assert (calculator.finish, calculator.dataset) == (None, None)

    countdown = build(f"{HERE}:Countdown", turns=2).environment
    state = countdown.reset(Prompt("p", [1], ""), 0)
    assert not countdown.step(state, "a").done
    assert countdown.step(state, "b").done


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("calculator", {}, "--environment: unknown name 'calculator' \\(use package.module:name\\)"),
        (f"{HERE}:WithoutStep", {}, "has no method step: it is a class with reset and step, or an async"),
        (f"{HERE}:Countdown", {"turn": 1}, "cannot be made with --environment-kwargs .* unexpected keyword"),
        (f"{HERE}:RowsNotInAMethod", {}, "dataset must be a method, got "),
        (f"{HERE}:thing", {}, "3 is not a callable object"),
    ],
)
def test_an_invalid_environment_is_one_line(name, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        build(name, **kwargs)
