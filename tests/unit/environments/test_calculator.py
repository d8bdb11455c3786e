"""The calculator is exact, bounded, and never more than a calculator."""

import math
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdptrain.environments.calculator import MAX_BITS, Calculator, answer, evaluate
from fsdptrain.types import Prompt, Turn

BUSY = settings(deadline=None, max_examples=50)  # other processes may keep an example waiting
NUMBERS = st.integers(0, 10**6).map(str)
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(lambda parts: f"({' '.join(parts)})"),
    max_leaves=8,
)


def reply(response: str, **options: bool) -> Turn:
    calculator = Calculator(**options)
    return calculator.step(calculator.reset(Prompt("p", [1], ""), seed=0), response)


@BUSY
@given(EXPRESSIONS)
def test_it_is_exact(expression: str) -> None:
    try:
        expected = eval(expression, {"__builtins__": {}}, {})  # floats, so only a bound of the error can be compared
    except ZeroDivisionError:
        assert answer(expression) == "error: division by zero"
        return
    assert float(evaluate(expression)) == pytest.approx(expected, rel=1e-9, abs=1e-6)
    if "/" not in expression:
        assert evaluate(expression) == expected


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12 * (3 + 4)", "84"),
        ("1/3 + 1/3 + 1/3", "1"),
        ("0.1 + 0.2", "0.3"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("2 ** 10 - 2 ^ 3", "1016"),
        ("2 × 3 ÷ 4", "1.5"),
        ("2 ** -1", "0.5"),
        ("1 / 3", "0.3333333333"),
        ("(" * 120 + "1" + ")" * 120, "1"),
    ],
)
def test_known_values(expression: str, value: str) -> None:
    assert answer(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('true')", "x", "1 if 1 else 2", "[1]", "True", "1j", "'a' * 9", "9 ** 9 ** 9",
        "2 ** 100000", "2 ** 0.5", "1 <", "", "((((", "(" * 300, "9" * 300, "1e9", "012", "\0",
        "7 ** 7 ** 7 ** 7", "(2 ** 500) * (2 ** 500)", "1 / 0", "lambda: 1", "1_0", "5 5", "5 (5)",
    ],
)  # fmt: skip
def test_whatever_else_is_written_is_an_error_that_the_model_reads_at_once(expression: str) -> None:
    begin = time.monotonic()
    assert answer(expression).startswith("error: ")
    assert time.monotonic() - begin < 30  # what is not refused takes hours


@BUSY
@given(st.text(alphabet="0123456789+-*/%.() ^eE_xl'\n", max_size=40))
def test_no_text_raises(text: str) -> None:
    assert isinstance(answer(text), str)


@BUSY
@given(st.integers(-(10**30), 10**30), st.integers(-300, 300))
def test_powers_stay_within_the_bound(base: int, exponent: int) -> None:
    result = answer(f"({base}) ** ({exponent})")
    if base and abs(exponent) * math.log2(max(2, abs(base))) < MAX_BITS - 1:
        exact = Fraction(base) ** exponent
        assert result == (str(exact.numerator) if exact.denominator == 1 else f"{float(exact):.10g}")
    assert len(result) < 200


def test_a_response_with_calls_gets_their_values_and_one_without_is_the_last() -> None:
    turn = reply(
        '<tool>1+1</tool> and <tool_call>{"name": "calculator", "arguments": {"expression": "2*3"}}</tool_call>'
    )
    assert turn == Turn([{"role": "tool", "content": "2\n6"}])
    assert reply("<answer>2</answer>") == Turn(done=True)
    assert reply("<tool>1+1") == Turn(done=True)  # cut short


@pytest.mark.parametrize(
    "call", ["{", '"calculator"', '{"name": "calculator"}', '{"name": "calculator", "arguments": [1]}', '{"name": "x"}']
)
def test_a_call_that_cannot_be_read_is_told_to_the_model(call: str) -> None:
    [message] = reply(f"<tool_call>{call}</tool_call>").observation
    assert message["content"].startswith("error: ")


def test_the_model_is_told_of_the_tool_once() -> None:
    assert "<tool>" in Calculator().system_prompt
    assert Calculator().tools == ()
    assert "<tool>" not in Calculator(native_tools=True).system_prompt
    assert Calculator(native_tools=True).tools[0]["function"]["name"] == "calculator"
