"""The answer in a response."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdptrain.rewards.answers import extract_answer, find_answer, spoken
from fsdptrain.rewards.code import code
from fsdptrain.rewards.functions import exact, math
from fsdptrain.types import Prompt


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so <answer> 42 </answer>.", "42"),
        ("<answer>1</answer> no, <answer>2</answer>", "2"),
        ("<answer>1</answer> no, <answer>2", "1"),
        ("<answer>1 <answer>2</answer>", "2"),
        ("<answer>1</answer> no </answer>", "1"),
        ("<answer>line\nbreak</answer>", "line\nbreak"),
        ("<answer></answer>", ""),
        (r"\boxed{1} and \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{1} <answer>2</answer> \boxed{3}", "2"),
        (r"</answer> <answer> \boxed{3}", "3"),
        (r"\boxed{1}, no: \fbox {2}", "2"),
        (r"<answer> \boxed{\frac{1}{2}} </answer>", r"\frac{1}{2}"),
        (r"<answer>\boxed{1} or \boxed{2}</answer>", r"\boxed{1} or \boxed{2}"),
        ("  just 42 \n", "just 42"),
        ("", ""),
    ],
)
def test_the_last_marked_answer_counts_else_the_whole_text(text: str, answer: str) -> None:
    assert extract_answer(text) == answer


@given(st.text(alphabet="ab<>/\\{} ", max_size=30), st.text(alphabet="ab{}\\ ", max_size=9))
def test_the_last_tag_is_found_in_any_text(before: str, answer: str) -> None:
    assert find_answer(f"{before}<answer>{answer}</answer>") == answer.strip()


@given(st.text(alphabet="\\boxed{}a ", max_size=40))
def test_an_answer_is_stripped_text(text: str) -> None:
    assert extract_answer(text) == extract_answer(text).strip()


@pytest.mark.parametrize(
    ("prompt", "response", "answer"),
    [
        ("?", "hm</think>4", "4"),
        ("?", "<think>hm</think> 4", "4"),
        ("?", "<answer>4</answer>? no</think>5", "5"),
        ("?", "<think>4", ""),
        ("? <think>\n", "4", ""),
        ("? <think>\n", "3?</think>4", "4"),
        ("? <think>\n\n</think>\n\n", "4", "4"),
        ("?", "<think>a</think>3<think>b</think><answer>4</answer>", "4"),
        ("?", "4 <think>or 5", "4"),
        ("?", "just 4", "just 4"),
    ],
)
def test_no_reward_looks_for_the_answer_in_a_thought(prompt: str, response: str, answer: str) -> None:
    asked = Prompt("a", [1], prompt, label="4")
    assert extract_answer(spoken(asked, response)) == answer
    assert exact(asked, response) == (answer == "4")
    assert math(asked, response) == (answer in ("4", "just 4"))
    program = Prompt("a", [1], prompt, label="assert f() == 4")
    assert code(program, response.replace("4", "\n```python\ndef f(): return 4\n```\n"))["reward"] == ("4" in answer)  # type: ignore[index]


@pytest.mark.parametrize(
    ("label", "right", "wrong"),
    [
        (["4", "four"], ["4", "four"], ["five", ""]),
        (" sun", ["sun", "<answer> sun\n</answer>"], ["Sun"]),
        (42.0, ["42", "42.0", " 42 "], ["43", "x"]),
        (42, ["42", "42.0"], ["4.2e", "nan"]),
        (Decimal("42.0"), ["42", "42.00"], ["43"]),
        ("007", ["007"], ["7"]),
        ([7, "seven"], ["7", "7.0", "seven"], ["8"]),
        (True, ["True", "true"], ["1", "false"]),
        (2**53 + 1, ["9007199254740993"], ["9007199254740992", "1e999999999", "sNaN"]),
    ],
)
def test_exact_takes_one_of_several_labels_and_numbers_as_numbers(label: object, right: list, wrong: list) -> None:
    prompt = Prompt("a", [1], "?", label=label)
    assert [exact(prompt, text) for text in right] == [1.0] * len(right)
    assert [exact(prompt, text) for text in wrong] == [0.0] * len(wrong)


def test_math_takes_one_of_several_labels() -> None:
    prompt = Prompt("a", [1], "?", label=["1/2", 7])
    assert [math(prompt, text) for text in ("0.5", "\\boxed{7}", "8")] == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("label", [None, "", " ", [], [""], float("nan")])
def test_exact_cannot_score_a_row_without_a_label(label: object) -> None:
    assert exact(Prompt("a", [1], "?", label=label), "") is None
    assert math(Prompt("a", [1], "?", label=label), "0") is None
