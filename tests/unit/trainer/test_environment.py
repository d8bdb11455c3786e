"""Environments by import path. An invalid one is refused in one line."""

import pytest

from examples.calculator.calculator import ANSWER_PROMPT, Calculator
from fsdptrain.config import Config, DataConfig, EnvironmentConfig
from fsdptrain.data.prompts import make_prompt
from fsdptrain.data.tables import as_rows
from fsdptrain.errors import ConfigError, DataError
from fsdptrain.trainer.samples.environment import build_environment
from fsdptrain.types import Prompt, Turn
from tests.testing import tiny_tokenizer

HERE = "tests.unit.trainer.test_environment"
NAMES = [f"{HERE}:Countdown", "examples.calculator.calculator:Calculator"]


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


async def agent(client, prompt): ...


def build(*names: str, **kwargs):
    key = "env" if len(names) > 1 else None
    return build_environment(EnvironmentConfig(environment=[*names], environment_kwargs=kwargs), key)


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
    ("names", "kwargs", "message"),
    [
        (["calculator"], {}, "--environment: unknown name 'calculator' \\(use package.module:name\\)"),
        ([f"{HERE}:WithoutStep"], {}, "has no method step: it is a class with reset and step, or an async"),
        ([f"{HERE}:Countdown"], {"turn": 1}, "cannot be made with --environment-kwargs .* unexpected keyword"),
        ([f"{HERE}:RowsNotInAMethod"], {}, "dataset must be a method, got "),
        ([f"{HERE}:thing"], {}, "3 is not a callable object"),
        (NAMES, {"turns": 2}, "--environment-kwargs turns: it is NAME=.* of Countdown, Calculator with"),
        (NAMES, {"Countdown": 2}, "--environment-kwargs Countdown: it is NAME="),
        ([*NAMES, f"{HERE}:agent"], {}, "--environment agent: an agent cannot be one of multiple"),
    ],
)
def test_an_invalid_environment_is_one_line(names, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        build(*names, **kwargs)


def test_a_column_names_the_environment_of_a_row_and_so_its_instructions():
    loaded, tokenizer = build(*NAMES, Countdown={"turns": 2}, Calculator={"native_tools": True}), tiny_tokenizer()
    tokenizer.chat_template += "{% if tools %}TOOLS{% endif %}"
    data = DataConfig(environment_key="env", prompt_data="x", label_key="")
    config = Config(hf_checkpoint="x", environment=NAMES, data=data)
    values = [{"prompt": "?", "env": name} for name in ("Countdown", "Calculator", "", None, "Game")]
    rows = loaded.rows_of(as_rows(values, data), config, tokenizer)
    prompts = [make_prompt(rows[index], tokenizer, data=data) for index in range(4)]
    found = [type(loaded.of(prompt).environment).__name__ for prompt in prompts]
    assert found == ["Countdown", "Calculator", "_SingleTurn", "_SingleTurn"]
    texts = [prompt.text for prompt in prompts]
    assert [index for index, text in enumerate(texts) if "TOOLS" in text and ANSWER_PROMPT in text] == [1]
    assert texts[0] == texts[2] == texts[3] == "<|user|>?<|end|><|assistant|>"
    with pytest.raises(DataError, match="env: row dataset:4 has 'Game', --environment has Countdown, Calculator"):
        rows[4]
