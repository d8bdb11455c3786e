"""The rewards math, format and reasoning_gym."""

import pytest

from fsdptrain.config import DataConfig
from fsdptrain.rewards.build import REWARDS
from fsdptrain.types import Prompt


def prompt(label: object = None, text: str = "", **metadata: object) -> Prompt:
    return Prompt("p", [1], text, label=label, metadata=metadata)


@pytest.mark.parametrize(
    ("label", "response", "reward"),
    [
        ("42", "The answer is \\boxed{42}.", 1),
        ("42", "<answer>42</answer>", 1),
        ("42", "It is 42", 1),
        ("42", "<answer>41</answer>", 0),
        ("42", "I do not know", 0),
        ("42", "", 0),
        (42, "<answer>42.0</answer>", 1),
        ("1/2", "<answer>0.5</answer>", 1),
        ("\\frac{1}{2}", "<answer>\\frac{2}{4}</answer>", 1),
        ("$x^2-1$", "\\boxed{(x-1)(x+1)}", 1),
        ("\\boxed{7}", "<answer>$7$</answer>", 1),
        ("Ann has 3 + 4 apples.\n#### 7", "<answer>7</answer>", 1),
        ("#### 1,234", "<answer>1234</answer>", 1),
    ],
)
def test_math_compares_as_mathematics(label: object, response: str, reward: float) -> None:
    assert REWARDS["math"](prompt(label), response) == reward


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        (" <think>\na\n</think>\n\n<answer>b</answer>\n", 1),
        ("<think></think><answer></answer>", 1),
        ("<think>a</think><answer>b</answer> and more", 0),
        ("so <think>a</think><answer>b</answer>", 0),
        ("<answer>b</answer><think>a</think>", 0),
        ("<think>a</think>", 0),
        ("<think>a<answer>b</answer></think>", 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0),
        ("<think>a</think>x<answer>b</answer>", 0),
        ("", 0),
    ],
)
def test_format_requires_both_tags_once_and_nothing_else(response: str, reward: float) -> None:
    assert REWARDS["format"](prompt(), response) == reward


def test_a_reward_can_read_what_the_template_wrote_of_the_response() -> None:
    for prefix in ("<think>\n", "<think>\n\n</think>\n\n", ""):
        whole = "<think>\n\n</think>\n\n<answer>b</answer>"
        asked = prompt(text=f"Use <think> and </think>.<|assistant|>{prefix}")
        assert asked.response_prefix == prefix
        assert REWARDS["format"](asked, whole.removeprefix(prefix)) == 1


def test_reasoning_gym_uses_the_scorer_of_the_task() -> None:
    from fsdptrain.data.sources import load_rows

    for task in ("spell_backward", "gsm_symbolic", "countdown"):
        row = load_rows(DataConfig(prompt_data=f"reasoning_gym:{task}?size=5"), seed=0)[3]
        asked = prompt(row.label, **row.metadata)
        assert REWARDS["reasoning_gym"](asked, f"well... <answer>{row.label}</answer>") == 1
        wrong = REWARDS["reasoning_gym"](asked, "<answer>-12345</answer>")
        assert isinstance(wrong, float)
        assert wrong < 0.2


ODD_ANSWERS = ["", "foo", "None", "{}", "[[", "-1", "1e999", "1/0", "nan", "²", "9" * 5000, "\x00"]
RAISING = ("prime_factorization", "boxnet", "coin_flip", "game_of_life")  # scorers that raise at some of these


@pytest.mark.parametrize("task", [*RAISING, "gsm_symbolic", "countdown", "sudoku"])
def test_an_answer_that_a_task_cannot_read_is_wrong_and_not_unscored(task: str) -> None:
    from fsdptrain.data.sources import load_rows

    row = load_rows(DataConfig(prompt_data=f"reasoning_gym:{task}?size=1"), seed=0)[0]
    asked = prompt(row.label, **row.metadata)
    for answer in ODD_ANSWERS:
        assert 0 <= REWARDS["reasoning_gym"](asked, f"<answer>{answer}</answer>") < 0.5, answer
