"""The answer in a response."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdptrain.rewards.answers import extract_answer, find_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so <answer> 42 </answer>.", "42"),
        ("<answer>1</answer> no, <answer>2</answer>", "2"),
        ("<answer>1</answer> no, <answer>2", "1"),
        ("<answer>1 <answer>2</answer>", "2"),
        ("<answer>line\nbreak</answer>", "line\nbreak"),
        ("<answer></answer>", ""),
        (r"\boxed{1} and \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{1} <answer>2</answer> \boxed{3}", "2"),
        (r"</answer> <answer> \boxed{3}", "3"),
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
